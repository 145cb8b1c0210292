"""Qwen2 and Qwen2.5 (biases of q, k, v) and dense Qwen3 (norms of q and k)."""

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import GLOBAL, LOCAL, Family, GgufNames, common_json, read_equal_layers, with_windows
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import LAYER_NAMES
from lorawgpu.families.spec import LayerSpec, Norms

QWEN3_NORMS = Norms(q="self_attn.q_norm", k="self_attn.k_norm")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
READS = frozenset({"sliding_window", "layer_types"})


def read_layers(keys: Keys, norms: Norms, bias: bool) -> tuple[LayerSpec, ...]:
    """Layers from `max_window_layers` on have a window if `use_sliding_window` is set; published files leave it off."""
    layers = read_equal_layers(keys, norms=norms, bias=bias)
    window = keys.window() if keys.flag("use_sliding_window") else None
    first = keys.integer("max_window_layers", at_least=0)
    kinds = keys.layer_types([GLOBAL if window is None or i < first else LOCAL for i in range(len(layers))])
    return with_windows(layers, kinds, window)


def config_json(config: ModelConfig) -> dict:
    bias = config.layers[0].attention.bias
    name, model_type = ("Qwen2ForCausalLM", "qwen2") if bias else ("Qwen3ForCausalLM", "qwen3")
    return common_json(config) | {"architectures": [name], "model_type": model_type, "use_sliding_window": False}


QWEN2 = Family(
    name="qwen2",
    architectures={"qwen2": "Qwen2ForCausalLM"},
    defaults={"qwen2": DEFAULTS},
    layers=lambda keys: read_layers(keys, Norms(), bias=True),
    gguf=GgufNames(archs=("qwen2",), readable=("qwen2",), layer_names=LAYER_NAMES, permuted=False),
    config_json=config_json,
    reads=READS,
)
QWEN3 = Family(
    name="qwen3",
    architectures={"qwen3": "Qwen3ForCausalLM"},
    defaults={"qwen3": DEFAULTS | {"head_dim": 128}},
    norms=QWEN3_NORMS,
    layers=lambda keys: read_layers(keys, QWEN3_NORMS, bias=False),
    gguf=GgufNames(
        archs=("qwen3",),
        readable=("qwen3",),
        layer_names=LAYER_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
        permuted=False,
    ),
    config_json=config_json,
    reads=READS,
)
