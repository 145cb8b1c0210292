"""Write a model's sizes and options as GGUF metadata: the inverse of `families.gguf`, which reads it back as a check.

Keys are those of llama.cpp's converters, below the architecture's name.
"""

from typing import Any

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family
from lorawgpu.families.gguf import ROPE_FREQS
from lorawgpu.families.rope import Rope, yarn_scale
from lorawgpu.families.spec import LayerSpec


def metadata_of(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Key -> bool, int, float, str, or a list of one of these."""
    layer = main_layer(config)
    attention = layer.attention
    return {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": layer.mlp.width,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": attention.rope.rotary(attention.head_dim),
        "rope.freq_base": attention.rope.theta,
        **_scaling(attention.rope),
        **family.gguf.metadata(config),
    }


def rope_tensors(config: ModelConfig, family: Family) -> dict[str, np.ndarray]:
    """The tensors that stretch RoPE, float32: divisors of the frequencies."""
    attention = main_layer(config).attention
    tensors = family.gguf.rope_tensors(config)
    if attention.rope.kind == "llama3" or (attention.rope.kind == "default" and attention.rope.freq_factors):
        plain = Rope(attention.rope.theta).inv_freq(attention.head_dim)
        tensors[ROPE_FREQS] = plain / attention.rope.inv_freq(attention.head_dim)
    return {name: np.asarray(values, np.float32) for name, values in tensors.items()}


def main_layer(config: ModelConfig) -> LayerSpec:
    """The layer that metadata describes: the first one with RoPE and without a window, or else the first one."""
    layers = [layer for layer in config.layers if layer.attention.rope.kind != "none"]
    whole = [layer for layer in layers if layer.attention.window is None]
    return (whole or layers or config.layers)[0]


def _scaling(rope: Rope) -> dict[str, Any]:
    if rope.kind not in ("linear", "yarn"):
        return {}
    scaling: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        scaling["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
        if not np.isclose(rope.attention_factor, yarn_scale(rope.factor)):
            scaling["rope.scaling.yarn_attn_factor"] = rope.attention_factor
    return scaling
