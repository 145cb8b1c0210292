"""SmolLM3: Llama with layers that do not encode positions."""

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import (
    GLOBAL,
    LOCAL,
    Family,
    GgufNames,
    common_json,
    read_equal_layers,
    with_windows,
    without_rope,
)
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import LAYER_NAMES, NORMS
from lorawgpu.families.spec import LayerSpec
from lorawgpu.files.untrusted import brief

INTERVAL = 4


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """`no_rope_layers` says 1 for a layer with RoPE; without it, every `no_rope_layer_interval`th layer has none."""
    layers = read_equal_layers(keys, norms=NORMS)
    every = keys.integer("no_rope_layer_interval", default=INTERVAL)
    flags = keys.data.get("no_rope_layers")
    flags = [int((i + 1) % every != 0) for i in range(len(layers))] if flags is None else flags
    if not isinstance(flags, list) or len(flags) != len(layers) or not all(flag in (0, 1) for flag in flags):
        raise UserError(f"{keys.source}: no_rope_layers is {brief(flags)}; wanted {len(layers)} of 0 and 1.")
    layers = tuple(layer if flag else without_rope(layer) for layer, flag in zip(layers, flags, strict=True))
    window = keys.window() if keys.flag("use_sliding_window") else None
    kinds = [GLOBAL if window is None or flag else LOCAL for flag in flags]
    return with_windows(layers, keys.layer_types(kinds), window)


def config_json(config: ModelConfig) -> dict:
    return common_json(config) | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [int(layer.attention.rope.kind != "none") for layer in config.layers],
        "use_sliding_window": False,
        "pad_token_id": config.pad_token_id,
    }


FAMILY = Family(
    name="smollm3",
    architectures={"smollm3": "SmolLM3ForCausalLM"},
    defaults={
        "smollm3": {
            "rms_norm_eps": 1e-6,
            "rope_theta": 2000000.0,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        }
    },
    layers=read_layers,
    gguf=GgufNames(archs=("smollm3",), readable=("smollm3",), layer_names=LAYER_NAMES, permuted=True),
    config_json=config_json,
    reads=frozenset({"sliding_window", "layer_types"}),
)
