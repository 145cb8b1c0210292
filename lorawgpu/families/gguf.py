"""Read a model's sizes and options from GGUF metadata. Unsupported options are refused by name."""

import math

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig, check_sizes
from lorawgpu.families.family import Family, equal_layers
from lorawgpu.families.registry import BY_GGUF_ARCH
from lorawgpu.families.rope import Rope
from lorawgpu.files.gguf import BITNET_ADVICE, GgufFile
from lorawgpu.files.untrusted import brief

ROPE_FREQS = "rope_freqs.weight"
# Key below the architecture's name -> (our option, the values that mean "off").
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
    """Read the metadata of an open GGUF file. UserError, naming the key, if it is missing or not supported."""
    source = str(file.path)
    family = _family(file)
    heads = _integer(file, "attention.head_count")
    hidden = _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(file, key, head_dim) != head_dim:
            name = _full(file, key)
            raise UserError(f"{source}: {name} differs from the head size {head_dim}; this is not supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{source}: tensor token_embd.weight is missing; wanted a complete model.")
    ends = [_token(file, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    layers = equal_layers(
        _integer(file, "block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_integer(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        width=_integer(file, "feed_forward_length"),
        act=family.gguf.act,
        rope=Rope(_number(file, "rope.freq_base", 10000.0), freq_factors=_freq_factors(file)),
        norms=family.norms,
    )
    config = ModelConfig(
        family=family.name,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        max_position_embeddings=_integer(file, "context_length"),
        rms_norm_eps=_number(file, "attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.tensors,
        ternary=None,
        bos_token_id=_token(file, "bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=_token(file, "padding_token_id"),
        layers=layers,
    )
    check_sizes(config, source)
    return config


def _family(file: GgufFile) -> Family:
    name = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model":
        what = brief(file.metadata["general.type"])
        raise UserError(f"{file.path}: general.type is {what}; wanted a model (pass an adapter with --adapter).")
    if isinstance(name, str) and name.startswith("bitnet"):
        raise UserError(f"{file.path}: architecture {brief(name)} is not supported as GGUF; {BITNET_ADVICE}.")
    if not isinstance(name, str) or name not in BY_GGUF_ARCH:
        supported = ", ".join(BY_GGUF_ARCH)
        raise UserError(f"{file.path}: architecture {brief(name)} is not supported; wanted {supported}.")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"{file.path}: is one part of a split model; join it first (llama-gguf-split --merge).")
    for key, (option, neutral) in UNSUPPORTED.items():
        value = file.metadata.get(_full(file, key))
        if value is not None and not any(np.array_equal(value, item) for item in neutral):
            raise UserError(f"{file.path}: {_full(file, key)} = {brief(value)} ({option}) is not supported yet.")
    return BY_GGUF_ARCH[name]


def _full(file: GgufFile, key: str) -> str:
    return f"{file.metadata['general.architecture']}.{key}"


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(_full(file, key), default)
    if value is None:
        raise UserError(f"{file.path}: metadata key {_full(file, key)} is missing.")
    if type(value) is not int or value < 1:
        raise UserError(
            f"{file.path}: {_full(file, key)} is {brief(value)}; wanted one whole number, at least 1, for all layers."
        )
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(_full(file, key), default)
    if value is None:
        raise UserError(f"{file.path}: metadata key {_full(file, key)} is missing.")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UserError(f"{file.path}: {_full(file, key)} is {brief(value)}; wanted a finite number.")
    return float(value)


def _token(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and type(value) is not int:
        raise UserError(f"{file.path}: tokenizer.ggml.{key} is {brief(value)}; wanted a token id.")
    return value


def _freq_factors(file: GgufFile) -> tuple[float, ...] | None:
    """Llama 3's RoPE scaling, which GGUF stores as a divisor for each frequency."""
    if ROPE_FREQS not in file.tensors:
        return None
    values, kind = file.read(ROPE_FREQS)
    if kind != "F32" or values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
        raise UserError(f"{file.path}: {ROPE_FREQS} is not a vector of positive numbers.")
    return tuple(values.astype(float).tolist())
