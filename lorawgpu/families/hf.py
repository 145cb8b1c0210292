"""Read a Hugging Face `config.json`.

Options that the kernels do not implement are refused by name here, before anything is loaded: a model that silently
runs without its sliding window would train on garbage.
"""

from dataclasses import replace

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig, check_sizes
from lorawgpu.families.family import GLOBAL, Family
from lorawgpu.families.keys import Keys
from lorawgpu.families.registry import BY_MODEL_TYPE
from lorawgpu.files.untrusted import brief

# Keys for which null means: no window, no cap, no grouping of heads.
NULLS = ("sliding_window", "num_key_value_heads", "attn_logit_softcapping", "final_logit_softcapping")
PARTIAL = "partial_rotary_factor"
TEXT_PREFIX, MULTIMODAL_PREFIX = "model.", "model.language_model."
# Key -> (the option's name, the values that mean "off"). Any other value is refused, naming both, unless the family
# reads the key itself (`Family.reads`).
OPTIONS = {
    "attention_bias": ("qkv_bias", (None, False)),
    "qkv_bias": ("qkv_bias", (None, False)),
    "use_bias": ("qkv_bias", (None, False)),
    "mlp_bias": ("mlp_bias", (None, False)),
    "qk_norm": ("qk_norm", (None, False)),
    "use_qk_norm": ("qk_norm", (None, False)),
    "attn_logit_softcapping": ("attn_softcap", (None,)),
    "attn_softcap": ("attn_softcap", (None,)),
    "final_logit_softcapping": ("logit_softcap", (None,)),
    "logit_softcap": ("logit_softcap", (None,)),
    "logits_scaling": ("logits_scaling", (None, 1)),
    "post_norms": ("post_norms", (None, False)),
    "norm_offset": ("norm_offset", (None, False, 0)),
    "embed_scale": ("embed_scale", (None, False, 1)),
    "embedding_multiplier": ("embed_scale", (None, 1)),
    "residual_multiplier": ("residual_multiplier", (None, 1)),
    "query_pre_attn_scalar": ("attn_scale", (None,)),
    "attention_multiplier": ("attn_scale", (None,)),
    "attn_scale": ("attn_scale", (None,)),
    PARTIAL: ("partial_rotary_factor", (None, 1)),
    "num_local_experts": ("mixture of experts", (None, 0, 1)),
    "num_experts": ("mixture of experts", (None, 0, 1)),
    "enable_moe_block": ("mixture of experts", (None, False)),
    "use_bidirectional_attention": ("bidirectional attention", (None, False)),
    "is_causal": ("bidirectional attention", (None, True)),
    "per_layer_config": ("sizes by layer", (None, {})),
}


# Part of a model_type -> what the kernels lack for it.
FOREIGN = {
    "moe": "a mixture of experts",
    "mixtral": "a mixture of experts",
    "qwen3_5": "gated delta nets",
    "qwen3_next": "gated delta nets",
    "mamba": "Mamba layers",
}


def from_hf(data: dict, source: str = "config.json") -> ModelConfig:
    """Read the contents of a `config.json`.

    `source` names the file in messages. UserError, naming the key, if it is missing, out of range or not supported.
    """
    family, model_type = _family(data, source)
    ends = Keys(data, source).token_ids("eos_token_id")
    prefix = MULTIMODAL_PREFIX if model_type in family.text else TEXT_PREFIX
    if model_type in family.text:
        data, model_type, source = _text_config(data, family, model_type, source)
    config = read_config(family, model_type, data, source, prefix)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + ends)))


def read_config(family: Family, model_type: str, data: dict, source: str, prefix: str) -> ModelConfig:
    """The config of a text model from the keys of its config.json. prefix: of its modules. UserError as `from_hf`."""
    keys = Keys(_with_defaults(data, family.defaults[model_type]), source)
    _refuse_options(keys, family)
    config = ModelConfig(
        family=family.name,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        ternary=family.ternary(keys),
        bos_token_id=next(iter(keys.token_ids("bos_token_id")), None),
        eos_token_ids=keys.token_ids("eos_token_id"),
        pad_token_id=next((i for i in keys.token_ids("pad_token_id") if i >= 0), None),
        layers=family.layers(keys),
        prefix=prefix,
        **family.options(keys),
    )
    check_sizes(config, source)
    return config


def _text_config(data: dict, family: Family, model_type: str, source: str) -> tuple[dict, str, str]:
    """The settings of a multimodal model's text part, its model type, and where they come from."""
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{source}: text_config is {brief(text)}; wanted an object of settings.")
    inner = text.get("model_type", family.text[model_type])
    if inner not in family.defaults:
        supported = ", ".join(family.defaults)
        raise UserError(f"{source}, text_config: model_type {brief(inner)} is not supported; wanted {supported}.")
    # As in transformers, the outer settings say whether the head is tied, and if no one does, it is.
    shared = {key: data[key] for key in ("tie_word_embeddings", "pad_token_id") if data.get(key) is not None}
    tied = shared.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    text = {key: value for key, value in text.items() if key not in family.unread}
    return {**shared, **text, "tie_word_embeddings": tied is None or tied}, inner, f"{source}, text_config"


def _family(data: dict, source: str) -> tuple[Family, str]:
    if not isinstance(data, dict):
        raise UserError(f"{source}: wanted a JSON object of settings, got {type(data).__name__}.")
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in BY_MODEL_TYPE:
        supported, known = ", ".join(BY_MODEL_TYPE), [why for part, why in FOREIGN.items() if part in str(model_type)]
        why = f" ({known[0]})" if known else ""
        raise UserError(f"{source}: model_type {brief(model_type)}{why} is not supported; wanted one of {supported}.")
    wanted = BY_MODEL_TYPE[model_type].architectures[model_type]
    names = data.get("architectures") or [wanted]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{source}: architectures is {brief(names)}; wanted a list of names.")
    if wanted not in names:
        raise UserError(
            f"{source}: architecture {', '.join(names)[:100]} is not supported; for model_type {model_type} "
            f"wanted {wanted}."
        )
    return BY_MODEL_TYPE[model_type], model_type


def _with_defaults(data: dict, defaults: dict) -> dict:
    """Fill in defaults. A null value counts as missing, unless null has a meaning."""
    present = {key: value for key, value in data.items() if value is not None}
    nulls = {key: None for key in NULLS if key in data}
    return {**defaults, **nulls, **present}


def _refuse_options(keys: Keys, family: Family) -> None:
    data, source = keys.data, keys.source
    window = data.get("sliding_window")
    if "sliding_window" not in family.reads and window is not None and data.get("use_sliding_window") is not False:
        raise UserError(f"{source}: sliding_window {brief(window)} is not supported yet; wanted null.")
    types = data.get("layer_types")
    if "layer_types" not in family.reads and types and set(map(str, types)) != {GLOBAL}:
        raise UserError(f"{source}: layer_types {brief(types)} is not supported for this model; wanted {GLOBAL} only.")
    for key, (option, neutral) in OPTIONS.items():
        value = data.get(key)
        if key == PARTIAL and value is None:
            value = next((s[key] for s in _rope_settings(data) if s.get(key) is not None), None)
        if key not in family.reads and value not in neutral:
            name = key if key == option else f"{key} ({option})"
            wanted = f"wanted {neutral[-1]!r}, or no such key"
            raise UserError(f"{source}: {name} = {brief(value)} is not supported yet; {wanted}.")


def _rope_settings(data: dict) -> list[dict]:
    """The objects of RoPE settings, one for all layers or one for each type of layer."""
    settings = [data.get(name) for name in ("rope_parameters", "rope_scaling")]
    settings = [item for item in settings if isinstance(item, dict)]
    return settings + [value for item in settings for value in item.values() if isinstance(value, dict)]


def to_hf(config: ModelConfig, family: Family, torch_dtype: str) -> dict:
    """The `config.json` of a model with dense weights of `torch_dtype`, with sorted keys.

    UserError for a RoPE scaling that config.json cannot express.
    """
    data = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.num_hidden_layers,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": torch_dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    return dict(sorted((data | family.config_json(config)).items()))
