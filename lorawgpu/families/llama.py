"""Llama, and models of the same form: SmolLM2, TinyLlama, Mistral without a sliding window, Falcon3 1.58bit."""

from functools import partial

from lorawgpu.families.bitlinear import read_ternary
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, GgufNames, read_equal_layers
from lorawgpu.families.rope import rope_settings
from lorawgpu.families.spec import Norms

NORMS = Norms()
GGUF = GgufNames(
    archs=("llama",),
    layer_names={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    permuted=True,
    act="silu",
)


def config_json(config: ModelConfig) -> dict:
    """The keys of a dense Llama, spelled so that all transformers versions can read them."""
    layer = config.layers[0]
    theta, scaling = rope_settings(layer.attention.rope, layer.attention.head_dim, config.max_position_embeddings)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": layer.attention.head_dim,
        "hidden_act": layer.mlp.act,
        "intermediate_size": layer.mlp.width,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": layer.attention.heads,
        "num_key_value_heads": layer.attention.kv_heads,
        "rope_scaling": scaling,
        "rope_theta": theta,
    }


FAMILY = Family(
    name="llama",
    architectures={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    defaults={
        "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 2048},
        "mistral": {
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    },
    norms=NORMS,
    layers=partial(read_equal_layers, norms=NORMS),
    ternary=partial(read_ternary, required=False),
    gguf=GGUF,
    config_json=config_json,
)
