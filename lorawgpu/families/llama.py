"""Llama, and models of the same form: SmolLM2, TinyLlama, Falcon3 1.58bit."""

from functools import partial

from lorawgpu.families.bitlinear import read_ternary
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, GgufNames, common_json, read_equal_layers
from lorawgpu.families.spec import Norms

NORMS = Norms()
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF = GgufNames(archs=("llama",), readable=("llama",), layer_names=LAYER_NAMES, permuted=True)


def config_json(config: ModelConfig) -> dict:
    """The keys of a dense Llama, spelled so that all transformers versions can read them."""
    return common_json(config) | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
    }


FAMILY = Family(
    name="llama",
    architectures={"llama": "LlamaForCausalLM"},
    defaults={
        "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 2048}
    },
    norms=NORMS,
    layers=partial(read_equal_layers, norms=NORMS),
    ternary=partial(read_ternary, required=False),
    gguf=GGUF,
    config_json=config_json,
)
