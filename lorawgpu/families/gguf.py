"""Read a model's sizes and options from GGUF metadata. Only architecture `llama`; everything else by name refused."""

import math

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig, Rope, check_sizes
from lorawgpu.files.gguf import BITNET_ADVICE, GgufFile
from lorawgpu.files.untrusted import brief

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"
# Key below `llama.` -> (our option, the values that mean "off").
UNSUPPORTED = {
    "expert_count": ("mixture of experts", (0,)),
    "attention.sliding_window": ("sliding_window", (0,)),
    "attention.scale": ("attn_scale", ()),
    "attention.causal": ("bidirectional attention", (True,)),
    "attention.clamp_kqv": ("clamp_kqv", (0.0,)),
    "attn_logit_softcapping": ("attn_softcap", ()),
    "final_logit_softcapping": ("logit_softcap", ()),
    "logit_scale": ("logit_scale", (1.0,)),
    "embedding_scale": ("embed_scale", (1.0,)),
    "residual_scale": ("residual_scale", (1.0,)),
    "rope.scaling.type": ("rope scaling", ("none",)),
    "rope.scale_linear": ("rope scaling", (1.0,)),
}


def from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata of an open GGUF file. Raises UserError for what is missing or not supported, by name."""
    source = str(file.path)
    _check_architecture(file)
    heads = _integer(file, "attention.head_count")
    hidden = _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(file, key, head_dim) != head_dim:
            raise UserError(f"{source}: llama.{key} differs from the head size {head_dim}, which is not supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{source}: tensor token_embd.weight is missing; wanted a whole model.")
    ends = [_token(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    config = ModelConfig(
        family="llama",
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=_integer(file, "feed_forward_length"),
        num_hidden_layers=_integer(file, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_integer(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_integer(file, "context_length"),
        rms_norm_eps=_number(file, "attention.layer_norm_rms_epsilon"),
        rope=Rope(_number(file, "rope.freq_base", 10000.0), freq_factors=_freq_factors(file)),
        act="silu",
        sub_norms=False,
        tie_word_embeddings="output.weight" not in file.tensors,
        ternary=None,
        bos_token_id=_token(file, "bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=_token(file, "padding_token_id"),
    )
    check_sizes(config, source)
    return config


def _check_architecture(file: GgufFile) -> None:
    name = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model":
        what = brief(file.metadata["general.type"])
        raise UserError(f"{file.path}: general.type is {what}; wanted a model (an adapter goes beside it: --adapter).")
    if isinstance(name, str) and name.startswith("bitnet"):
        raise UserError(f"{file.path}: architecture {brief(name)} is not supported as GGUF; {BITNET_ADVICE}.")
    if name != ARCHITECTURE:
        raise UserError(f"{file.path}: architecture {brief(name)} is not supported; supported is {ARCHITECTURE}.")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"{file.path}: is one part of a split model; join it first (llama-gguf-split --merge).")
    for key, (option, neutral) in UNSUPPORTED.items():
        value = file.metadata.get(f"{ARCHITECTURE}.{key}")
        if value is not None and not any(np.array_equal(value, item) for item in neutral):
            raise UserError(f"{file.path}: llama.{key} = {brief(value)} ({option}) is not supported yet.")


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if value is None:
        raise UserError(f"{file.path}: metadata key llama.{key} is missing.")
    if type(value) is not int or value < 1:
        raise UserError(f"{file.path}: llama.{key} is {brief(value)}; wanted one whole number from 1 for all layers.")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if value is None:
        raise UserError(f"{file.path}: metadata key llama.{key} is missing.")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{file.path}: llama.{key} is {brief(value)}; wanted a finite number.")
    return float(value)


def _token(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and type(value) is not int:
        raise UserError(f"{file.path}: tokenizer.ggml.{key} is {brief(value)}; wanted a token id.")
    return value


def _freq_factors(file: GgufFile) -> tuple[float, ...] | None:
    """Llama 3's RoPE scaling, which a GGUF holds as the divisor of each frequency."""
    if ROPE_FREQS not in file.tensors:
        return None
    values, kind = file.read(ROPE_FREQS)
    if kind != "F32" or values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
        raise UserError(f"{file.path}: {ROPE_FREQS} is not a row of numbers above 0.")
    return tuple(values.astype(float).tolist())
