"""Read a Hugging Face `config.json`.

A value that the kernels do not compute is refused by name here, before anything is loaded: a model that
silently runs without its sliding window trains on garbage.
"""

from lorawgpu.errors import UserError
from lorawgpu.families.config import SIZE_LIMITS, ModelConfig, Rope, check_sizes
from lorawgpu.files.untrusted import brief

# What transformers' own config classes assume for a key left out (Llama, Mistral, BitNet configurations).
HF_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 131072,
                "num_key_value_heads": 8, "sliding_window": 4096},
    "bitnet": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "relu2", "max_position_embeddings": 2048,
               "num_key_value_heads": 5},
}  # fmt: skip
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "bitnet": "BitNetForCausalLM"}

# Hugging Face key -> (our option, the values that mean "off"). Any other value is refused by both names.
UNSUPPORTED = {
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
    "partial_rotary_factor": ("partial_rotary_factor", (None, 1)),
    "num_local_experts": ("mixture of experts", (None, 0, 1)),
    "num_experts": ("mixture of experts", (None, 0, 1)),
}


def from_hf(data: dict, source: str = "config.json") -> ModelConfig:
    """Read the contents of a `config.json`.

    `source` names the file in messages. Raises UserError for a missing key, a value out of range, and anything
    that is not supported, by name.
    """
    model_type = _model_type(data, source)
    data = _with_defaults(data, HF_DEFAULTS[model_type])
    _refuse_unsupported(data, source)
    heads = _integer(data, "num_attention_heads", source)
    hidden = _integer(data, "hidden_size", source)
    bitnet = model_type == "bitnet"
    config = ModelConfig(
        family="bitnet" if bitnet else "llama",
        vocab_size=_integer(data, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_integer(data, "intermediate_size", source),
        num_hidden_layers=_integer(data, "num_hidden_layers", source),
        num_attention_heads=heads,
        num_key_value_heads=_integer(data, "num_key_value_heads", source, default=heads),
        head_dim=_integer(data, "head_dim", source) if "head_dim" in data else _head_dim(hidden, heads, source),
        max_position_embeddings=_integer(data, "max_position_embeddings", source),
        rms_norm_eps=_number(data, "rms_norm_eps", source),
        rope=_rope(data, source),
        act=_activation(data, source),
        sub_norms=bitnet,
        tie_word_embeddings=_flag(data, "tie_word_embeddings", source),
        ternary=_ternary(data.get("quantization_config"), bitnet, source),
        bos_token_id=next(iter(token_ids(data.get("bos_token_id"), "bos_token_id", source)), None),
        eos_token_ids=token_ids(data.get("eos_token_id"), "eos_token_id", source),
        pad_token_id=next(iter(i for i in token_ids(data.get("pad_token_id"), "pad_token_id", source) if i >= 0), None),
    )
    check_sizes(config, source)
    return config


def _model_type(data: dict, source: str) -> str:
    if not isinstance(data, dict):
        raise UserError(f"{source}: wanted a JSON object of settings, got {type(data).__name__}.")
    model_type = data.get("model_type")
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"{source}: model_type {brief(model_type)} is not supported; supported are {supported}.")
    names = data.get("architectures") or [ARCHITECTURES[model_type]]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{source}: architectures is {brief(names)}; wanted a list of names.")
    if ARCHITECTURES[model_type] not in names:
        raise UserError(
            f"{source}: architecture {', '.join(names)[:100]} is not supported; for model_type {model_type} "
            f"wanted {ARCHITECTURES[model_type]}."
        )
    return model_type


def _with_defaults(data: dict, defaults: dict) -> dict:
    """A null setting counts as left out, except where null has a meaning of its own: no window, no grouping."""
    given = {key: value for key, value in data.items() if value is not None}
    nulls = {key: None for key in ("sliding_window", "num_key_value_heads") if key in data}
    return {**defaults, **nulls, **given}


def _refuse_unsupported(data: dict, source: str) -> None:
    window = data.get("sliding_window")
    if window is not None and data.get("use_sliding_window") is not False:
        raise UserError(f"{source}: sliding_window {brief(window)} is not supported yet; wanted null.")
    for key, (option, neutral) in UNSUPPORTED.items():
        value = data.get(key)
        if value not in neutral:
            name = key if key == option else f"{key} ({option})"
            wanted = f"wanted {neutral[-1]!r} or no key"
            raise UserError(f"{source}: {name} = {brief(value)} is not supported yet; {wanted}.")


def _integer(data: dict, key: str, source: str, default: int | None = None) -> int:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"{source}: {key} is missing; wanted a whole number of at least 1.")
    if type(value) is not int or not 1 <= value <= SIZE_LIMITS[key]:
        raise UserError(f"{source}: {key} is {brief(value)}; wanted a whole number from 1 to {SIZE_LIMITS[key]}.")
    return value


def _number(data: dict, key: str, source: str) -> float:
    value = data.get(key)
    if value is None:
        raise UserError(f"{source}: {key} is missing; wanted a number.")
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise UserError(f"{source}: {key} is {brief(value)}; wanted a number above 0.")
    return float(value)


def _flag(data: dict, key: str, source: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{source}: {key} is {brief(value)}; wanted true or false.")
    return value


def token_ids(value: object, key: str, source: str) -> tuple[int, ...]:
    """A token id setting (none, one, or a list) as a tuple; raises UserError for anything else."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in values):
        raise UserError(f"{source}: {key} is {brief(value)}; wanted a token id or a list of them.")
    return tuple(dict.fromkeys(values))


def _head_dim(hidden: int, heads: int, source: str) -> int:
    if hidden % heads:
        raise UserError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is missing."
        )
    return hidden // heads


def _activation(data: dict, source: str) -> str:
    names = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
    value = data.get("hidden_act")
    if not isinstance(value, str) or value not in names:
        raise UserError(f"{source}: hidden_act (act) {brief(value)} is not supported; supported are silu and relu2.")
    return names[value]


def _rope(data: dict, source: str) -> Rope:
    """Both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`. The first wins, as in transformers."""
    spelling = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    settings = data.get(spelling) or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise UserError(f"{source}: {spelling} is {brief(settings)}; wanted one object of settings for all layers.")
    settings = {key: value for key, value in settings.items() if value is not None}
    where = f"{source}, {spelling}"
    if settings.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"{where}: partial_rotary_factor {brief(settings['partial_rotary_factor'])} is not supported.")
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = _number({"rope_theta": data["rope_theta"], **settings}, "rope_theta", source)
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise UserError(f"{where}: rope_type {brief(kind)} is not supported; supported are default and llama3.")
    original = "original_max_position_embeddings"
    low, high = _number(settings, "low_freq_factor", where), _number(settings, "high_freq_factor", where)
    if low >= high:
        raise UserError(f"{where}: low_freq_factor {low} is not below high_freq_factor {high}.")
    context = _number({original: data["max_position_embeddings"], **settings}, original, where)
    return Rope(theta, "llama3", _number(settings, "factor", where), low, high, int(context))


def _ternary(settings: object, bitnet: bool, source: str) -> str | None:
    """How `w` comes from the file. Names and defaults are those of transformers' BitNetQuantConfig."""
    where = f"{source}, quantization_config"
    if settings is None:
        if bitnet:
            raise UserError(
                f"{source}: a bitnet model needs a quantization_config that says where its scales come from "
                "(linear_class, quantization_mode); this file has none. If --to merged --dequantize wrote it, it "
                "is for evaluation by other tools: here give the ternary base, and the adapter with --adapter."
            )
        return None
    if not isinstance(settings, dict):
        raise UserError(f"{where}: wanted an object of settings, got {brief(settings)}.")
    method = settings.get("quant_method")
    if method != "bitnet":
        raise UserError(f"{where}: quant_method {brief(method)} is not supported; supported is bitnet.")
    if settings.get("use_rms_norm"):
        raise UserError(f"{where}: use_rms_norm {brief(settings['use_rms_norm'])} is not supported; wanted false.")
    kept = settings.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not set(map(str, kept)) <= {"lm_head", "embed_tokens", "model.embed_tokens"}:
        raise UserError(f"{where}: modules_to_not_convert {brief(kept)} is not supported; wanted ['lm_head'].")
    mode, linear_class = settings.get("quantization_mode") or "offline", settings.get("linear_class")
    if linear_class not in (None, "bitlinear", "autobitlinear"):
        raise UserError(f"{where}: linear_class {brief(linear_class)} is not known; wanted bitlinear or autobitlinear.")
    if mode not in ("online", "offline"):
        raise UserError(f"{where}: quantization_mode {brief(mode)} is not known; wanted online or offline.")
    if mode == "online":
        if linear_class == "bitlinear":
            raise UserError(f"{where}: quantization_mode online needs linear_class autobitlinear, got bitlinear.")
        return "online"
    return "multiply" if linear_class == "autobitlinear" else "divide"
