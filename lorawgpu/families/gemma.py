"""Gemma 2 (soft caps) and Gemma 3 (norms of q and k, two RoPEs): local and global layers, norms with weight 1 + w."""

import math
from dataclasses import replace

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import (
    GLOBAL,
    LOCAL,
    Family,
    GgufNames,
    common_json,
    equal_layers,
    read_local_rope,
    read_sizes,
    window_of,
    with_windows,
)
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import GELU, Keys
from lorawgpu.families.llama import LAYER_NAMES
from lorawgpu.families.rope import read_rope
from lorawgpu.families.spec import LayerSpec, Norms

GEMMA2_NORMS = Norms(
    mlp_in="pre_feedforward_layernorm", attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm"
)
GEMMA3_NORMS = replace(GEMMA2_NORMS, q="self_attn.q_norm", k="self_attn.k_norm")
LOCAL_THETA = 10000.0
SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA2_DEFAULTS = SIZES | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = SIZES | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": LOCAL_THETA,
    "sliding_window_pattern": 6,
}
READS = frozenset(
    {"sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
)
MULTIMODAL_VOCAB = 262208  # of the sizes with a vision tower


def read_gemma2_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Even layers are local. The cap of scores is in every layer."""
    count = keys.integer("num_hidden_layers")
    kinds = keys.layer_types([LOCAL if i % 2 == 0 else GLOBAL for i in range(count)])
    layers = _equal(keys, norms=GEMMA2_NORMS, rope=read_rope(keys), softcap=keys.optional("attn_logit_softcapping"))
    return with_windows(layers, kinds, keys.window())


def read_gemma3_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Every 6th layer is global, unless the file says otherwise; local layers have their own, unscaled RoPE."""
    count, pattern = keys.integer("num_hidden_layers"), keys.integer("sliding_window_pattern")
    kinds = keys.layer_types([GLOBAL if (i + 1) % pattern == 0 else LOCAL for i in range(count)])
    layers = _equal(keys, norms=GEMMA3_NORMS, rope=read_rope(keys, GLOBAL))
    local = read_local_rope(keys, keys.number("rope_local_base_freq"))
    return with_windows(layers, kinds, keys.window(), local)


def _equal(keys: Keys, **options) -> tuple[LayerSpec, ...]:
    options |= {"scale": keys.number("query_pre_attn_scalar") ** -0.5}
    options |= {"act": keys.activation("hidden_activation", GELU)}
    return equal_layers(keys.integer("num_hidden_layers"), **read_sizes(keys), **options)


def read_options(keys: Keys) -> dict:
    return {
        "embed_scale": math.sqrt(keys.integer("hidden_size")),
        "final_softcap": keys.optional("final_logit_softcapping"),
    }


def read_gemma2_gguf(meta: GgufKeys) -> dict:
    """Converters do not store query_pre_attn_scalar: it is C / NH in the 27B model of 46 layers, else the head size."""
    return {
        "query_pre_attn_scalar": _pre_attention_scalar(meta, 46),
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }


def read_gemma3_gguf(meta: GgufKeys) -> dict:
    """Only the sizes with a vision tower, 4B and larger, stretch the RoPE of global layers."""
    scaling = meta.get("rope.scaling.factor")
    return {
        "query_pre_attn_scalar": _pre_attention_scalar(meta, 62),
        "sliding_window": meta.integer("attention.sliding_window", 1024),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", LOCAL_THETA),
        "sliding_window_pattern": meta.integer("attention.sliding_window_pattern", 6),
        "multimodal": meta.file.tensors["token_embd.weight"].shape[0] == MULTIMODAL_VOCAB or bool(scaling),
    }


def write_gemma2_gguf(config: ModelConfig) -> dict:
    return {
        "attention.sliding_window": window_of(config),
        "attn_logit_softcapping": config.layers[0].attention.softcap,
        "final_logit_softcapping": config.final_softcap,
    }


def write_gemma3_gguf(config: ModelConfig) -> dict:
    """llama.cpp makes every 6th layer global, whatever a file says."""
    local = next((layer for layer in config.layers if layer.attention.window is not None), None)
    return {
        "attention.sliding_window": window_of(config),
        "rope.freq_base_swa": local.attention.rope.theta if local else LOCAL_THETA,
    }


def _pre_attention_scalar(meta: GgufKeys, layers_of_27b: int) -> float:
    if meta.get("attention.scale"):
        return meta.number("attention.scale") ** -2
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    if meta.integer("block_count") == layers_of_27b:
        return hidden // heads
    return meta.integer("attention.key_length", hidden // heads)


def config_json(config: ModelConfig) -> dict:
    layer = next((layer for layer in config.layers if layer.attention.window is None), config.layers[0])
    local = next((layer for layer in config.layers if layer.attention.window is not None), None)
    data = common_json(replace(config, layers=(layer,))) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _whole(layer.attention.scale**-2),
        "layer_types": [GLOBAL if item.attention.window is None else LOCAL for item in config.layers],
        "sliding_window": local and local.attention.window,
        "final_logit_softcapping": config.final_softcap,
        "attn_logit_softcapping": layer.attention.softcap,
    }
    if "q" not in layer.norms.paths():
        return data | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    return data | names | {"rope_local_base_freq": local.attention.rope.theta if local else LOCAL_THETA}


def _whole(value: float) -> float | int:
    """transformers wants a whole number here, and GGUF stores its inverse root in float32."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-6) else value


LAYER_NAMES_4 = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA2 = Family(
    name="gemma2",
    architectures={"gemma2": "Gemma2ForCausalLM"},
    defaults={"gemma2": GEMMA2_DEFAULTS},
    norms=GEMMA2_NORMS,
    layers=read_gemma2_layers,
    options=read_options,
    norm_offset=1.0,
    gguf=GgufNames(
        archs=("gemma2",),
        readable=("gemma2",),
        layer_names=LAYER_NAMES_4,
        permuted=False,
        act="gelu_tanh",
        keys=read_gemma2_gguf,
        metadata=write_gemma2_gguf,
        reads=frozenset(
            {"attention.scale", "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
        ),
    ),
    config_json=config_json,
    reads=READS,
)
GEMMA3 = Family(
    name="gemma3",
    architectures={"gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"},
    defaults={"gemma3_text": GEMMA3_DEFAULTS},
    norms=GEMMA3_NORMS,
    layers=read_gemma3_layers,
    options=read_options,
    text={"gemma3": "gemma3_text"},
    unread=frozenset({"final_logit_softcapping"}),
    norm_offset=1.0,
    gguf=GgufNames(
        archs=("gemma3",),
        readable=("gemma3",),
        layer_names=LAYER_NAMES_4 | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        permuted=False,
        act="gelu_tanh",
        keys=read_gemma3_gguf,
        metadata=write_gemma3_gguf,
        reads=frozenset(
            {"attention.scale", "attention.sliding_window", "attention.sliding_window_pattern", "rope.scaling.type"}
        ),
    ),
    config_json=config_json,
    reads=READS - {"attn_logit_softcapping"},
)
