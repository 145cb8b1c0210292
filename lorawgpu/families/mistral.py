"""Mistral: Llama with a sliding window in every layer. Ministral 3: YaRN, in a multimodal layout, text only."""

import math

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, GgufNames, common_json, read_equal_layers
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import LAYER_NAMES, NORMS
from lorawgpu.families.rope import yarn_scale
from lorawgpu.families.spec import LayerSpec

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    return read_equal_layers(keys, norms=NORMS, window=keys.window())


def config_json(config: ModelConfig) -> dict:
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return common_json(config) | names | {"sliding_window": config.layers[0].attention.window}


def ministral_json(config: ModelConfig) -> dict:
    raise UserError(
        "a Ministral 3 base that came as GGUF cannot be written as a Hugging Face folder, which has a vision tower; "
        "use the model's Hugging Face folder as the base instead"
    )


def ministral_gguf(meta: GgufKeys) -> dict:
    """Ministral 3's metadata: YaRN with the scale of queries. There is no key for mscale; llama.cpp takes 1."""
    more = {"llama_4_scaling_beta": "attention.temperature_scale", "mscale_all_dim": "rope.scaling.yarn_log_multiplier"}
    scaling = {
        "rope_type": "yarn",
        "factor": meta.number("rope.scaling.factor"),
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        "mscale": 1.0,
    }
    scaling |= {ours: meta.number(theirs) for ours, theirs in more.items() if meta.get(theirs)}
    return {"rope_scaling": scaling, "multimodal": True}


def write_ministral_gguf(config: ModelConfig) -> dict:
    """The multiplier is what makes llama.cpp's attention factor, with its mscale of 1, the model's. beta_fast and
    beta_slow are not kept by a config: other ones than the defaults are noticed when the file is read back."""
    rope = config.layers[0].attention.rope
    log = 0.1 * math.log(rope.factor) if rope.factor > 1 else 0.0
    multiplier = (yarn_scale(rope.factor) / rope.attention_factor - 1) / log if log else 0.0
    return {
        "attention.temperature_scale": rope.query_beta or None,
        "rope.scaling.yarn_log_multiplier": multiplier or None,
        "rope.scaling.yarn_attn_factor": None,
    }


MISTRAL = Family(
    name="mistral",
    architectures={"mistral": "MistralForCausalLM"},
    defaults={"mistral": DEFAULTS},
    layers=read_layers,
    gguf=GgufNames(archs=("llama",), layer_names=LAYER_NAMES, permuted=True),
    config_json=config_json,
    reads=frozenset({"sliding_window"}),
)
MINISTRAL3 = Family(
    name="ministral3",
    architectures={"ministral3": "Ministral3ForCausalLM", "mistral3": "Mistral3ForConditionalGeneration"},
    defaults={
        "ministral3": DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "sliding_window": None,
            "rope_parameters": MINISTRAL_ROPE,
        },
        "mistral": DEFAULTS,
    },
    layers=read_layers,
    gguf=GgufNames(
        archs=("mistral3",),
        readable=("mistral3",),
        layer_names=LAYER_NAMES,
        permuted=True,
        keys=ministral_gguf,
        metadata=write_ministral_gguf,
        reads=frozenset({"rope.scaling.type", "attention.temperature_scale"}),
    ),
    text={"mistral3": "mistral"},
    config_json=ministral_json,
    reads=frozenset({"sliding_window"}),
)
