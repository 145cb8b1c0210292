"""OLMo 2 and 3: norms after each half instead of before it; norms of q and k over all heads."""

from dataclasses import replace

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import (
    GLOBAL,
    LOCAL,
    Family,
    GgufNames,
    common_json,
    read_equal_layers,
    read_local_rope,
    window_of,
    with_windows,
)
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import LAYER_NAMES
from lorawgpu.families.rope import read_rope
from lorawgpu.families.spec import LayerSpec, Norms

NORMS = Norms(
    attn_in=None,
    mlp_in=None,
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    q="self_attn.q_norm",
    k="self_attn.k_norm",
)
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 2048}
LOCAL_THETA = 500000.0  # of OLMo 3's local layers in transformers, whatever rope_theta says
PATTERN = 4  # every 4th layer of OLMo 3 is global


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    return read_equal_layers(keys, norms=NORMS, whole_norm=True)


def read_olmo3_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """Local layers have a window and an unscaled RoPE; `rope_scaling` is for the global ones."""
    count = keys.integer("num_hidden_layers")
    kinds = keys.layer_types([GLOBAL if (i + 1) % PATTERN == 0 else LOCAL for i in range(count)])
    layers = read_equal_layers(keys, norms=NORMS, whole_norm=True, rope=read_rope(keys, GLOBAL))
    return with_windows(layers, kinds, keys.window(), read_local_rope(keys, LOCAL_THETA))


def read_gguf(meta: GgufKeys) -> dict:
    """OLMo 3 has the arch of OLMo 2, and a window."""
    window = meta.get("attention.sliding_window")
    if not window:
        return {}
    flags = meta.flags("attention.sliding_window_pattern")
    data = {"model_type": "olmo3", "sliding_window": window}
    if flags is not None:
        data["layer_types"] = [LOCAL if flag else GLOBAL for flag in flags]
    return data


def write_gguf(config: ModelConfig) -> dict:
    window = window_of(config)
    flags = [layer.attention.window is not None for layer in config.layers]
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": flags} if window else {}


def config_json(config: ModelConfig) -> dict:
    data = common_json(config) | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    windows = [layer.attention.window for layer in config.layers]
    if not any(windows):
        return data
    last = config.layers[windows.index(None)] if None in windows else config.layers[0]
    return data | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": next(filter(None, windows)),
        "layer_types": [GLOBAL if window is None else LOCAL for window in windows],
        "rope_scaling": common_json(replace(config, layers=(last,)))["rope_scaling"],
    }


GGUF = GgufNames(
    archs=("olmo2",),
    readable=("olmo2",),
    layer_names=LAYER_NAMES
    | {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
    permuted=False,
    keys=read_gguf,
    metadata=write_gguf,
    reads=frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.scaling.type"}),
)
OLMO2 = Family(
    name="olmo2",
    architectures={"olmo2": "Olmo2ForCausalLM"},
    defaults={"olmo2": DEFAULTS},
    norms=NORMS,
    layers=read_layers,
    gguf=GGUF,
    config_json=config_json,
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    architectures={"olmo3": "Olmo3ForCausalLM"},
    defaults={"olmo3": DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096}},
    layers=read_olmo3_layers,
    gguf=replace(GGUF, readable=()),
    reads=frozenset({"sliding_window", "layer_types"}),
)
