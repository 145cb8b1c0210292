"""Granite 3, and dense Granite 4 under the names of its hybrid: Llama with four multipliers."""

from dataclasses import replace

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family, GgufNames, common_json, read_equal_layers, without_rope
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import Keys
from lorawgpu.families.llama import LAYER_NAMES, NORMS
from lorawgpu.families.spec import LayerSpec, Paths
from lorawgpu.files.untrusted import brief

MULTIPLIERS = {"attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
               "logits_scaling": 1.0}  # fmt: skip
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    **MULTIPLIERS,
}
SHARED_MLP = Paths(gate_up=("shared_mlp.input_linear",), down=("shared_mlp.output_linear",))


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    scale, residual = keys.number("attention_multiplier"), keys.number("residual_multiplier")
    return read_equal_layers(keys, norms=NORMS, scale=scale, residual_scale=residual)


def read_hybrid_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """The layers of a hybrid without experts and without Mamba layers; others are refused by name."""
    types = keys.data.get("layer_types") or keys.data.get("layers_block_type")
    if not isinstance(types, list) or set(map(str, types)) - {"attention", "full_attention"}:
        raise UserError(
            f"{keys.source}: layer_types {brief(types)} is not supported: only attention layers are, no Mamba layers."
        )
    position = keys.data.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        raise UserError(f"{keys.source}: position_embedding_type is {brief(position)}; wanted rope, nope or null.")
    keys = Keys(keys.data | {"intermediate_size": keys.data.get("shared_intermediate_size")}, keys.source)
    layers = tuple(replace(layer, paths=SHARED_MLP) for layer in read_layers(keys))
    return layers if position == "rope" else tuple(map(without_rope, layers))


def read_options(keys: Keys) -> dict:
    return {"embed_scale": keys.number("embedding_multiplier"), "logits_scale": 1 / keys.number("logits_scaling")}


GGUF_KEYS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def read_gguf(meta: GgufKeys) -> dict:
    return {ours: meta.number(theirs, MULTIPLIERS[ours]) for ours, theirs in GGUF_KEYS.items()}


def write_gguf(config: ModelConfig) -> dict:
    values = _multipliers(config)
    return {theirs: values[ours] for ours, theirs in GGUF_KEYS.items()}


def _multipliers(config: ModelConfig) -> dict:
    layer = config.layers[0]
    return {
        "attention_multiplier": layer.attention.scale,
        "embedding_multiplier": config.embed_scale,
        "residual_multiplier": layer.residual_scale,
        "logits_scaling": 1 / config.logits_scale,
    }


def config_json(config: ModelConfig) -> dict:
    names = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    return common_json(config) | names | _multipliers(config)


GGUF = GgufNames(
    archs=("granite",),
    readable=("granite",),
    layer_names=LAYER_NAMES,
    permuted=True,
    keys=read_gguf,
    metadata=write_gguf,
    reads=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
)
FAMILY = Family(
    name="granite",
    architectures={"granite": "GraniteForCausalLM"},
    defaults={"granite": DEFAULTS},
    layers=read_layers,
    options=read_options,
    gguf=GGUF,
    config_json=config_json,
    reads=frozenset(MULTIPLIERS),
)
HYBRID = Family(
    name="granitemoehybrid",
    architectures={"granitemoehybrid": "GraniteMoeHybridForCausalLM"},
    defaults={"granitemoehybrid": DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024}},
    layers=read_hybrid_layers,
    options=read_options,
    gguf=replace(GGUF, readable=()),
    reads=frozenset(MULTIPLIERS) | {"layer_types"},
)
