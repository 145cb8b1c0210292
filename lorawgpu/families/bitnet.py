"""BitNet b1.58: ternary linear layers, squared relu, and a sub-norm in each half."""

from dataclasses import replace
from functools import partial

from lorawgpu.families import llama
from lorawgpu.families.bitlinear import read_ternary
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, common_json, read_equal_layers
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.spec import Norms

ARCHS = ("bitnet", "bitnet-b1.58", "bitnet-25")
NORMS = Norms(attn_sub="self_attn.attn_sub_norm", mlp_sub="mlp.ffn_sub_norm")


def gguf_keys(meta: GgufKeys) -> dict:
    """Metadata as keys of config.json. Files of arch `bitnet` are of models with either activation, and only new ones
    say which; the other archs are those of Microsoft's 2B4T, which has relu2."""
    act = meta.get("hidden_act") or meta.get("hidden_activation") or (None if meta.arch == "bitnet" else "relu2")
    return {"hidden_act": act, "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}}


def config_json(config: ModelConfig) -> dict:
    return common_json(config) | {"architectures": ["BitNetForCausalLM"], "model_type": "bitnet"}


FAMILY = Family(
    name="bitnet",
    architectures={"bitnet": "BitNetForCausalLM"},
    config_json=config_json,
    defaults={
        "bitnet": {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "relu2",
            "max_position_embeddings": 2048,
            "num_key_value_heads": 5,
        }
    },
    norms=NORMS,
    layers=partial(read_equal_layers, norms=NORMS),
    ternary=partial(read_ternary, required=True),
    # Runtimes use different architecture names; all keep Hugging Face's row order.
    gguf=replace(
        llama.GGUF,
        archs=ARCHS,
        permuted=False,
        act="relu2",
        readable=ARCHS,
        layer_names=llama.LAYER_NAMES | {"attn_sub_norm": NORMS.attn_sub, "ffn_sub_norm": NORMS.mlp_sub},
        keys=gguf_keys,
    ),
)
