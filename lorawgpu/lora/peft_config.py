"""The settings of a LoRA adapter, and reading and writing them as PEFT's `adapter_config.json`."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.families.modules import ALL_MODULES, EMBEDDING, ENDS, HEAD
from lorawgpu.files.untrusted import brief, read_json_object
from lorawgpu.lora.ends import check_modules_to_save, check_token_indices

# Keys without effect on what the adapter computes, except together with others that are rejected.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_to_transform", "lora_alpha",
    "lora_dropout", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "trainable_token_indices",
    "use_rslora",
}  # fmt: skip
# Other initializations (pissa, olora, corda, loftq, ...) also change the base weights that the adapter relies on.
_HARMLESS_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
MAX_RANK = 1 << 30  # and alpha
_MAX_PATTERN = 200  # characters
_MAX_PATTERNS = 500  # in one table: one for each linear layer of a large model
_MAX_QUANTIFIERS = 4


@dataclass(frozen=True)
class LoraConfig:
    """The supported part of PEFT's LoraConfig. Modules are paths such as "model.layers.0.self_attn.q_proj".

    target_modules: names, or one string, which is a regex of whole module paths. `rank_pattern` and `alpha_pattern` map
    regexes of module paths to values that override `r` and `alpha`. `modules_to_save` are trained whole, and of
    `trainable_token_indices`, module name to ids, rows; both are for the embedding and the head (lora/ends.py).
    """

    r: int
    alpha: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool = False
    dropout: float = 0.0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def targets(self, module: str) -> bool:
        """As PEFT's check_target_module_exists: a name is a full path, or the end of one after a dot."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, module) is not None
        return any(matches(target, module) for target in self.target_modules)

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """alpha / r, or with rsLoRA alpha / sqrt(r), of this module."""
        r, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r


def matches(target: str, module: str) -> bool:
    return module == target or module.endswith("." + target)


def _by_pattern(patterns: dict, module: str, default):
    """As PEFT's get_pattern_key: the first pattern that matches the whole path, or its end after a dot."""
    for pattern, value in patterns.items():
        if _whole(pattern).match(module):
            return value
    return default


@cache
def _whole(pattern: str) -> re.Pattern:
    """A pattern as PEFT uses it, inside another one: inline flags such as (?i) are an error there."""
    return re.compile(rf"(.*\.)?({pattern})$")


def lora_config_json(lora: LoraConfig, base_model_name: str, prefix: str = "") -> bytes:
    """`adapter_config.json` with keys that every version of PEFT knows: unknown ones crash old loaders.

    prefix: of all modules of a multimodal model's text part. Its targets become a pattern of these modules, because
    PEFT would also look for the names in the vision tower, and fails on layers there that it does not know.

    `use_rslora` and the patterns are written only if they are set: a loader without them would be wrong anyway.
    """
    config = {
        "base_model_name_or_path": base_model_name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _integral(lora.alpha),
        "lora_dropout": lora.dropout,
        "modules_to_save": list(lora.modules_to_save) or None,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": _written_targets(lora.target_modules, prefix),
        "task_type": "CAUSAL_LM",
    }
    if lora.use_rslora:
        config["use_rslora"] = True
    if rows := lora.trainable_token_indices:
        config["trainable_token_indices"] = rows[EMBEDDING] if list(rows) == [EMBEDDING] else rows
    if lora.rank_pattern:
        config["rank_pattern"] = lora.rank_pattern
    if lora.alpha_pattern:
        config["alpha_pattern"] = {pattern: _integral(alpha) for pattern, alpha in lora.alpha_pattern.items()}
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def _written_targets(targets: tuple[str, ...] | str, prefix: str) -> list[str] | str:
    """`target_modules` for PEFT: with a `prefix`, a regex that selects the same modules, and none outside of it."""
    if isinstance(targets, str):
        return f"(?={re.escape(prefix)})(?:{targets})" if prefix else targets
    if not prefix:
        return list(targets)
    names = "|".join(re.escape(target.removeprefix(prefix)) for target in targets if target != HEAD)
    return rf"{re.escape(prefix)}(.*\.)?({names})" + (f"|{HEAD}" if HEAD in targets else "")


def _integral(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def read_lora_config(path: Path, modules: Sequence[str]) -> LoraConfig:
    """Read `adapter_config.json` of an adapter with tensors for `modules`.

    UserError, naming the key, for an unsupported or invalid value.
    """
    config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {brief(config.get('peft_type'))}; only LORA adapters are supported")
    if config.get("use_dora"):
        raise UserError(f"{path}: use_dora: DoRA adapters are not supported; train a plain LoRA adapter instead")
    if config.get("bias", "none") != "none":
        raise UserError(f'{path}: bias is {brief(config["bias"])}; trained biases are not supported, wanted "none"')
    init = config.get("init_lora_weights")
    if init not in _HARMLESS_INITS:
        raise UserError(
            f"{path}: init_lora_weights {brief(init)} is not supported: it also changes the base weights; "
            "convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for key, value in config.items():
        if key not in _READ | _NO_EFFECT and not _is_empty(value):
            raise UserError(f"{path}: {brief(key)} is {brief(value)}; this setting is not supported")
    return LoraConfig(
        r=_number(path, config, "r", whole=True),
        alpha=_number(path, config, "lora_alpha"),
        target_modules=_targets(path, config, modules),
        use_rslora=_flag(path, config, "use_rslora"),
        dropout=_number(path, {"lora_dropout": 0.0} | config, "lora_dropout", low=0, below=1),
        rank_pattern=_patterns(path, config, "rank_pattern", whole=True),
        alpha_pattern=_patterns(path, config, "alpha_pattern"),
        modules_to_save=_checked(path, config, "modules_to_save", check_modules_to_save),
        trainable_token_indices=_checked(path, config, "trainable_token_indices", check_token_indices),
    )


def _checked(path: Path, config: dict, key: str, check: Callable):
    """The value of a key of the ends of the model, as `check` returns it."""
    try:
        return check(config.get(key) or [])
    except ValueError as error:
        raise UserError(f"{path}: {key} is {brief(config[key])}: {error}") from None


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _flag(path: Path, config: dict, key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path}: {key} is {brief(value)}; wanted true or false")
    return bool(value)


def _number(path: Path, config: dict, key: str, whole=False, low: float | None = None, below: float = math.inf):
    """A finite number, an int if `whole`: positive, or at least `low`; and less than `below`."""
    value = config.get(key)
    good = type(value) is int or (type(value) is float and not whole)
    good = good and value <= MAX_RANK  # `below` alone would accept integers that no float can represent
    if not good or not (value > 0 if low is None else value >= low) or not value < below:
        number = "whole number" if whole else "number"
        wanted = f"a positive {number}" if low is None else f"a {number} from {low} to below {below}"
        raise UserError(f"{path}: {key} is {brief(value)}; wanted {wanted}")
    return value


def _targets(path: Path, config: dict, modules: Sequence[str]) -> tuple[str, ...]:
    """The targets as names. A regex, `all-linear` or a selection of layers becomes the modules that have tensors.

    A listed name that is not one of our linear layers and has no tensors is dropped: PEFT's lists may name modules that
    the model does not have.
    """
    targets = config.get("target_modules")
    if isinstance(targets, str) or config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return tuple(modules)
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise UserError(f"{path}: target_modules is {brief(targets)}; wanted a list of module names")
    return tuple(
        t for t in targets if t.split(".")[-1] in (*ALL_MODULES, *ENDS) or any(matches(t, module) for module in modules)
    )


def _patterns(path: Path, config: dict, key: str, whole=False) -> dict:
    """A table of patterns. Their complexity is bounded: an untrusted regex can take forever to match."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise UserError(f"{path}: {key} is {brief(table)}; wanted an object of module patterns")
    if len(table) > _MAX_PATTERNS:
        raise UserError(f"{path}: {key} has {len(table):,} patterns; at most {_MAX_PATTERNS} are read")
    for pattern in table:
        _number(path, table, pattern, whole)
        quantifiers = len(re.findall(r"[*+?{]", pattern.replace("(?:", "(")))
        if len(pattern) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS or re.search(r"\)[*+?{]", pattern):
            raise UserError(f"{path}: {key}: {brief(pattern)} is too complex; use the module's path or the end of it")
        try:
            _whole(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(f"{path}: {key}: {brief(pattern)} is not a valid regular expression: {error}") from None
    return dict(table)
