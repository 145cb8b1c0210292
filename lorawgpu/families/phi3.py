"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, partial rotary embedding, longrope."""

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, GgufNames, common_json, read_equal_layers
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import NORMS
from lorawgpu.families.spec import LayerSpec, Paths

PATHS = Paths(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    return read_equal_layers(keys, norms=NORMS, paths=PATHS, window=keys.window())


def read_gguf(meta: GgufKeys) -> dict:
    """`sliding_window` 0 means none. The stretching is two tensors; `attn_factor` is that of cosines and sines."""
    head_dim = meta.integer(
        "attention.key_length", meta.integer("embedding_length") // meta.integer("attention.head_count")
    )
    rotary = meta.integer("rope.dimension_count", head_dim)
    data = {
        "sliding_window": meta.get("attention.sliding_window") or None,
        "partial_rotary_factor": rotary / head_dim,
        "original_max_position_embeddings": meta.integer(
            "rope.scaling.original_context_length", meta.integer("context_length")
        ),
    }
    if meta.has(LONG) and meta.has(SHORT):
        long, short = (meta.vector(name) for name in (LONG, SHORT))
        data["rope_scaling"] = {
            "type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": meta.number("rope.scaling.attn_factor", 1.0),
        }
    return data


def write_gguf(config: ModelConfig) -> dict:
    rope = config.layers[0].attention.rope
    data = {
        "attention.sliding_window": config.layers[0].attention.window or 0,
        "rope.scaling.original_context_length": rope.original_max_position_embeddings or config.max_position_embeddings,
    }
    return data | ({"rope.scaling.attn_factor": rope.attention_factor} if rope.switches else {})


def rope_tensors(config: ModelConfig) -> dict:
    rope = config.layers[0].attention.rope
    return {LONG: rope.long_factors, SHORT: rope.freq_factors} if rope.switches else {}


def config_json(config: ModelConfig) -> dict:
    attention = config.layers[0].attention
    return common_json(config) | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": attention.rope.original_max_position_embeddings
        or config.max_position_embeddings,
        "partial_rotary_factor": attention.rope.rotary(attention.head_dim) / attention.head_dim,
        "sliding_window": attention.window,
    }


FAMILY = Family(
    name="phi3",
    architectures={"phi3": "Phi3ForCausalLM"},
    defaults={
        "phi3": {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        }
    },
    layers=read_layers,
    gguf=GgufNames(
        archs=("phi3",),
        readable=("phi3",),
        layer_names={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        permuted=False,
        keys=read_gguf,
        metadata=write_gguf,
        rope_tensors=rope_tensors,
        reads=frozenset({"attention.sliding_window", "rope.scaling.type", "rope.dimension_count"}),
    ),
    config_json=config_json,
    reads=frozenset({"sliding_window", "partial_rotary_factor"}),
)
