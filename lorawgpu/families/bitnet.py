"""BitNet b1.58: ternary linear layers, squared relu, and a sub-norm in each half."""

from dataclasses import replace
from functools import partial

from lorawgpu.families import llama
from lorawgpu.families.bitlinear import read_ternary
from lorawgpu.families.family import Family, read_equal_layers
from lorawgpu.families.spec import Norms

NORMS = Norms(attn_sub="self_attn.attn_sub_norm", mlp_sub="mlp.ffn_sub_norm")


FAMILY = Family(
    name="bitnet",
    architectures={"bitnet": "BitNetForCausalLM"},
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
    gguf=replace(llama.GGUF, archs=("bitnet", "bitnet-b1.58"), permuted=False, act="relu2", readable=()),
)
