"""Read a model's sizes and options from GGUF metadata. Unsupported options are refused by name.

The metadata is translated to the keys of config.json, so that each family reads its options in one place.
"""

from dataclasses import replace

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig, check_sizes
from lorawgpu.families.family import Family
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.hf import MULTIMODAL_PREFIX, TEXT_PREFIX, read_config
from lorawgpu.families.registry import BY_GGUF_ARCH, BY_MODEL_TYPE
from lorawgpu.files.gguf import GgufFile
from lorawgpu.files.untrusted import brief

ROPE_FREQS = "rope_freqs.weight"
ROPE_TENSORS = {ROPE_FREQS, "rope_factors_long.weight", "rope_factors_short.weight"}
YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
# Key below the architecture's name -> (our option, the values that mean "off").
UNSUPPORTED = {
    "expert_count": ("mixture of experts", (0,)),
    "attention.sliding_window": ("sliding_window", (0,)),
    "attention.sliding_window_pattern": ("layers of several types", ()),
    "attention.scale": ("attn_scale", ()),
    "attention.temperature_scale": ("scaled queries", (0.0,)),
    "attention.causal": ("bidirectional attention", (True,)),
    "attention.clamp_kqv": ("clamp_kqv", (0.0,)),
    "attn_logit_softcapping": ("attn_softcap", ()),
    "final_logit_softcapping": ("logit_softcap", ()),
    "logit_scale": ("logit_scale", (1.0,)),
    "embedding_scale": ("embed_scale", (1.0,)),
    "residual_scale": ("residual_scale", (1.0,)),
    "rope.scale_linear": ("rope scaling", (1.0,)),
}


class ActivationUnknown(UserError):
    """The file does not say the model's activation."""


def from_gguf(file: GgufFile, act: str | None = None) -> ModelConfig:
    """Read the metadata of an open GGUF file. UserError, naming the key, if it is missing or not supported.

    act: the activation, by Hugging Face's name, instead of the file's. ActivationUnknown if neither says it.
    """
    meta, source = GgufKeys(file), str(file.path)
    family = _family(meta)
    data = _common(meta, family) | family.gguf.keys(meta)
    data |= {"hidden_act": act, "hidden_activation": act} if act else {}
    if data["hidden_act"] is None:
        raise ActivationUnknown(f"{source}: its metadata has no {meta.full('hidden_act')}")
    prefix = MULTIMODAL_PREFIX if data.pop("multimodal", False) else TEXT_PREFIX
    model_type = data.pop("model_type", None) or next(iter(family.defaults))
    family = BY_MODEL_TYPE.get(model_type, family)
    config = read_config(family, model_type, data, source, prefix)
    if ROPE_FREQS in file.tensors and "rope_freqs" not in family.gguf.reads:
        config = _stretched(config, tuple(meta.vector(ROPE_FREQS)))
        check_sizes(config, source)
    return config


def _common(meta: GgufKeys, family: Family) -> dict:
    """The keys of config.json that every architecture stores."""
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in family.gguf.reads and meta.integer(key, head_dim) != head_dim:
            name = meta.full(key)
            raise UserError(f"{meta.file.path}: {name} differs from the head size {head_dim}; this is not supported.")
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{meta.file.path}: tensor token_embd.weight is missing; wanted a complete model.")
    ends = [meta.token(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    act = {"silu": "silu", "relu2": "relu2", "gelu_tanh": "gelu_pytorch_tanh"}[family.gguf.act]
    return {
        "num_hidden_layers": meta.integer("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _one(meta, family, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": _one(meta, family, "feed_forward_length"),
        "hidden_act": act,
        "hidden_activation": act,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not meta.has("output.weight"),
        "bos_token_id": meta.token("bos_token_id"),
        "eos_token_id": [end for end in ends if end is not None],
        "pad_token_id": meta.token("padding_token_id"),
        "sliding_window": None,
    }


def _one(meta: GgufKeys, family: Family, key: str, default: int | None = None) -> int:
    """A size of all layers. UserError if they differ, unless the family reads it by layer."""
    values = meta.per_layer(key, default)
    if key not in family.gguf.reads and len(set(values)) > 1:
        raise UserError(f"{meta.file.path}: {meta.full(key)} is {brief(values)}; wanted the same for all layers.")
    return values[0]


def _rope_scaling(meta: GgufKeys) -> dict | None:
    kind = meta.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn", "longrope"):
        raise UserError(
            f"{meta.file.path}: {meta.full('rope.scaling.type')} = {brief(kind)} (rope scaling) is not supported yet."
        )
    if kind == "longrope":
        return None  # the family reads the factors
    scaling = {"rope_type": kind, "factor": meta.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
        scaling |= {ours: meta.number(theirs) for ours, theirs in YARN.items() if meta.get(theirs) is not None}
    return scaling


def _stretched(config: ModelConfig, factors: tuple[float, ...]) -> ModelConfig:
    """The config with Llama 3's RoPE scaling, which GGUF stores as a divisor for each frequency."""
    layers = {
        layer: replace(
            layer, attention=replace(layer.attention, rope=replace(layer.attention.rope, freq_factors=factors))
        )
        for layer in set(config.layers)
    }
    return replace(config, layers=tuple(layers[layer] for layer in config.layers))


def _family(meta: GgufKeys) -> Family:
    file = meta.file
    name = file.metadata.get("general.architecture")
    if file.metadata.get("general.type", "model") != "model":
        what = brief(file.metadata["general.type"])
        raise UserError(f"{file.path}: general.type is {what}; wanted a model (pass an adapter with --adapter).")
    if not isinstance(name, str) or name not in BY_GGUF_ARCH:
        supported = ", ".join(BY_GGUF_ARCH)
        raise UserError(f"{file.path}: architecture {brief(name)} is not supported; wanted {supported}.")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"{file.path}: is one part of a split model; join it first (llama-gguf-split --merge).")
    for key, (option, neutral) in UNSUPPORTED.items():
        value = meta.get(key)
        supported = key in BY_GGUF_ARCH[name].gguf.reads
        if value is not None and not supported and not any(np.array_equal(value, item) for item in neutral):
            raise UserError(f"{file.path}: {meta.full(key)} = {brief(value)} ({option}) is not supported yet.")
    return BY_GGUF_ARCH[name]
