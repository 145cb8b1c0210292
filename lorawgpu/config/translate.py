"""A config in axolotl's words, in ours: applied to the keys and values of a file before the schema checks them.

Nothing here knows a default or a type of ours; what comes out is checked like any other file.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorawgpu.config.axolotl import HARMLESS, MISSING, WITHOUT_EFFECT
from lorawgpu.config.source import ConfigProblem, Location
from lorawgpu.config.translate_data import translate_data_sets
from lorawgpu.config.translate_template import alpaca_template, translate_template


@dataclass(frozen=True)
class Notes:
    """What a run should tell about a file in axolotl's words. `optimizer`: the variant of AdamW that it names."""

    texts: tuple[str, ...]
    optimizer: str | None

    def lines(self, parameters: int) -> list[str]:
        """`parameters`: trainable ones, to say how much memory the optimizer takes."""
        state = f"{8 * parameters / 2**20:,.1f} MiB"
        adamw = [f"optimizer {self.optimizer}: AdamW with float32 state, {state}"] if self.optimizer else []
        return [*self.texts, *adamw]


@dataclass
class Translation:
    """What became of a file: `problems` to refuse it for, `notes` to print, and the optimizer that it names."""

    data: dict[str, Any]
    lines: dict[Location, int]
    problems: list[ConfigProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optimizer: str | None = None
    full: bool = False  # full_finetune is set

    def rename(self, key: str, name: str, value: Any = None) -> None:
        """Make `key` the key `name` of ours, with another value if one is given; a problem if both are set."""
        old = self.data.pop(key)
        value = old if value is None else value
        if self.data.setdefault(name, value) != value:
            self.refuse(key, f"{name} says otherwise: remove one of them")
        if (key,) in self.lines:
            self.lines.setdefault((name,), self.lines[key,])

    def refuse(self, key: str, text: str) -> None:
        self.problems.append(ConfigProblem((key,), f"{key}: {text}"))


def translate(data: dict[str, Any], lines: dict[Location, int], own: Sequence[str]) -> Translation:
    """Turn axolotl's keys in `data` into ours, in place; `own`: the keys of our schema. `lines` gets those of new keys.

    A key without a value is as good as absent.
    """
    t = Translation(data, lines)
    known = {*own, *WITHOUT_EFFECT, *MISSING, *CONVERT}
    for key in [key for key, value in data.items() if value is None and key in known]:
        del data[key]
    foreign = [key for key in data if key in known and key not in own]
    asked_for_lora = any(value for key, value in data.items() if key == "adapter" or key.startswith("lora_"))
    _refuse_missing(t)
    _drop_without_effect(t)
    for key, convert in CONVERT.items():
        if key in data:
            convert(t, data[key])
    for key in ("datasets", "test_datasets"):
        foreign += translate_data_sets(t, key)
    if foreign:
        alpaca_template(t)
        t.notes += _other_defaults(data)
        if t.full or not asked_for_lora:
            t.notes.append(
                "the file asks for full fine-tuning; a LoRA adapter is trained instead, which usually needs a "
                "learning_rate about ten times as high"
            )
    return t


def _refuse_missing(t: Translation) -> None:
    """One problem for each thing that is missing, at the first key that asks for it."""
    asked: dict[str, list[str]] = {}
    for key in [key for key in t.data if key in MISSING]:
        value = t.data.pop(key)
        if value and value != HARMLESS.get(key) and value != t.data.get("base_model"):
            asked.setdefault(MISSING[key], []).append(key)
    for what, keys in asked.items():
        t.problems.append(ConfigProblem((keys[0],), f"{', '.join(keys)}: missing here: {what}"))


def _drop_without_effect(t: Translation) -> None:
    dropped = {key: t.data.pop(key) for key in list(t.data) if key in WITHOUT_EFFECT}
    if keys := [key for key, value in dropped.items() if value]:
        t.notes.append(f"without effect here: {', '.join(keys)}")


def _other_defaults(data: dict[str, Any]) -> list[str]:
    """Where the file leaves out a key, and axolotl's default is not ours."""
    texts = []
    if not data.get("warmup_steps") and not data.get("warmup_ratio"):
        texts.append("no warmup (axolotl: 3% of the steps, at most 100)")
    if not any(key in data for key in ("save_steps", "saves_per_epoch")):
        texts.append("a checkpoint every 100 steps (axolotl: every epoch)")
    if data.get("load_in_4bit") and "bnb_4bit_quant_type" not in data:
        texts.append("load_in_4bit makes Q4_0, with a smaller error (axolotl: `bnb_4bit_quant_type: nf4`)")
    if data.get("lr_scheduler") == "rex" and "lr_scheduler_kwargs" not in data:
        texts.append("rex as published (axolotl: `lr_scheduler_kwargs: {rex_beta: 0.9}`)")
    return [f"our defaults hold: {'; '.join(texts)}"] if texts else []


# Keys that become others, and values in axolotl's words of keys that are ours too


def _optimizer(t: Translation, value: Any) -> None:
    del t.data["optimizer"]
    if not isinstance(value, str) or value not in ADAMW:
        wanted = "adamw, adamw_torch or another AdamW"
        t.refuse("optimizer", f"got {value!r}; missing here: other optimizers than AdamW; wanted {wanted}")
    elif value not in ("adamw", "adamw_torch", "adamw_torch_fused"):
        t.optimizer = value


def _target_linear(t: Translation, value: Any) -> None:
    if _is_true(value):
        t.data["lora_target_modules"] = "all-linear"
    del t.data["lora_target_linear"]


def _checkpointing(t: Translation, value: Any) -> None:
    if isinstance(value, str) and value in ("offload", "offload_disk", "legacy", "unsloth"):
        t.data["gradient_checkpointing"] = True
        t.notes.append(f"gradient_checkpointing {value}: true, nothing is moved off the GPU")


def _attention(t: Translation, value: Any) -> None:
    if isinstance(value, str) and value not in ("flash", "chain"):
        del t.data["attn_implementation"]
        t.notes.append(f"attn_implementation {value}: flash, our own kernel; it computes the same")


def _eval_strategy(t: Translation, value: Any) -> None:
    key = "eval_strategy" if "eval_strategy" in t.data else "evaluation_strategy"
    _strategy(t, key, "evals_per_epoch")
    if value in ("no", False):
        for name in ("eval_steps", "evals_per_epoch"):
            t.data.pop(name, None)
        if t.data.get("val_set_size") or t.data.get("test_datasets"):
            t.notes.append(f"{key} no: what is held out is evaluated after each epoch all the same")


def _save_strategy(t: Translation, value: Any) -> None:
    _strategy(t, "save_strategy", "saves_per_epoch")
    if value in ("no", False):
        t.notes.append("save_strategy no: checkpoints are saved all the same, and a crash costs at most save_steps")


def _strategy(t: Translation, key: str, per_epoch: str) -> None:
    value = t.data[key]
    if value == "epoch":
        t.rename(key, per_epoch, 1)
        return
    del t.data[key]
    if value not in ("no", False, "steps", "best"):  # the best one by held-out loss is always kept
        t.refuse(key, f"got {value!r}; wanted no, epoch, steps or best")


def _per_epoch(t: Translation, value: Any) -> None:
    """As in axolotl, not an error where nothing is held out."""
    if not value:
        del t.data["evals_per_epoch"]
    elif not any(t.data.get(key) for key in ("val_set_size", "test_datasets", "sample_prompts")) and not _folders(t):
        del t.data["evals_per_epoch"]
        t.notes.append("evals_per_epoch: nothing to evaluate; val_set_size would hold samples out")


def _folders(t: Translation) -> bool:
    """Whether a data set is a folder, which may hold validation files."""
    sets = t.data.get("datasets")
    return isinstance(sets, list) and any(isinstance(s, dict) and os.path.isdir(str(s.get("path"))) for s in sets)


def _none_if(key: str, *values: int) -> Callable[[Translation, Any], None]:
    """Numbers that stand for none in transformers."""

    def convert(t: Translation, value: Any) -> None:
        if type(value) is int and value in values:
            del t.data[key]

    return convert


def _quantization_options(t: Translation, value: Any) -> None:
    del t.data["bnb_config_kwargs"]
    if not isinstance(value, dict):
        t.refuse("bnb_config_kwargs", f"got {value!r}; wanted options such as `bnb_4bit_quant_type: nf4`")
        return
    rest = [str(key) for key in value if key != "bnb_4bit_quant_type"]
    if "bnb_4bit_quant_type" in value:
        t.data.setdefault("bnb_4bit_quant_type", value["bnb_4bit_quant_type"])
    if rest:
        t.notes.append(f"without effect here: {', '.join(rest)} (of bnb_config_kwargs)")


def _plugins(t: Translation, value: Any) -> None:
    del t.data["plugins"]
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    kernels = [name for name in names if any(word in name.lower() for word in KERNEL_PLUGINS)]
    if kernels:
        t.notes.append(f"without effect here: {', '.join(name.split('.')[-1] for name in kernels)} (plugins)")
    if others := [name for name in names if name not in kernels]:
        t.refuse("plugins", f"missing here: {', '.join(others)}; remove it to train without")


def _loggers(t: Translation, value: Any) -> None:
    """Without `report_to`: W&B if it has a project, unless it is switched off, and what is switched on."""
    if not t.data.get("wandb_project"):
        t.data.pop("wandb_project", None)
    wandb = t.data.pop("use_wandb", "wandb_project" in t.data and t.data.get("wandb_mode") != "disabled")
    on = {"wandb": wandb, "tensorboard": t.data.pop("use_tensorboard", False)}
    t.data.setdefault("report_to", [name for name, value in on.items() if _is_true(value)])


def _nowhere(t: Translation, value: Any) -> None:
    if value in ("none", ["none"]):
        t.data["report_to"] = []


def _special_tokens(t: Translation, value: Any) -> None:
    """Padding is known by its place, and other tokens than BOS and EOS have no part in training."""
    if not isinstance(value, dict):
        return
    kept = {name: token for name, token in value.items() if token is not None}
    idle = [name for name in ("pad_token", "unk_token", "additional_special_tokens") if kept.pop(name, None)]
    t.data["special_tokens"] = kept
    if idle:
        t.notes.append(f"without effect here: {', '.join(idle)} (of special_tokens)")


def _shuffle(t: Translation, value: Any) -> None:
    del t.data["shuffle_merged_datasets"]
    if not _is_true(value):
        t.refuse("shuffle_merged_datasets", "missing here: data in its own order; samples are shuffled in each epoch")


def _full(t: Translation, value: Any) -> None:
    del t.data["full_finetune"]
    t.full = _is_true(value)


def _is_true(value: Any) -> bool:
    return value is True or isinstance(value, str) and value.lower() == "true"


def _renamed(key: str, name: str) -> Callable[[Translation, Any], None]:
    return lambda t, value: t.rename(key, name)


ADAMW = {
    "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_anyprecision", "optimi_adamw",
    "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_8bit",
    "ao_adamw_fp8", "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit",
}  # fmt: skip
KERNEL_PLUGINS = ("liger", "cut_cross_entropy", "kernels", "lm_eval", "swanlab")
CONVERT: dict[str, Callable[[Translation, Any], None]] = {
    "optimizer": _optimizer,
    "lora_target_linear": _target_linear,
    "gradient_checkpointing": _checkpointing,
    "attn_implementation": _attention,
    "eval_strategy": _eval_strategy,
    "evaluation_strategy": _eval_strategy,
    "evals_per_epoch": _per_epoch,
    "save_strategy": _save_strategy,
    "bnb_config_kwargs": _quantization_options,
    "plugins": _plugins,
    "wandb_project": _loggers,
    "use_wandb": _loggers,
    "use_tensorboard": _loggers,
    "report_to": _nowhere,
    "special_tokens": _special_tokens,
    "chat_template": translate_template,
    "shuffle_merged_datasets": _shuffle,
    "full_finetune": _full,
    "peft_use_rslora": _renamed("peft_use_rslora", "use_rslora"),
    "model_config": _renamed("model_config", "overrides_of_model_config"),
    "adam_eps": _renamed("adam_eps", "adam_epsilon"),
    "dataset_processes": _renamed("dataset_processes", "dataset_num_proc"),
    "max_steps": _none_if("max_steps", 0, -1),
    "saves_per_epoch": _none_if("saves_per_epoch", 0),
}
