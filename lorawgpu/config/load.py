"""Reading a config file: YAML, `--set` overrides, other tools' names, paths, and all problems in one message."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lorawgpu.config.mapping import NAME, read_mapping
from lorawgpu.config.other_tools import take_other_names
from lorawgpu.config.schema import METHODS, TrainConfig
from lorawgpu.config.source import (
    ConfigProblem,
    Location,
    apply_override,
    dotted,
    explain,
    find_path,
    format_problems,
    read_yaml,
)
from lorawgpu.config.translate import Notes, translate
from lorawgpu.config.types import DataSet, SpecialTokens
from lorawgpu.errors import UserError
from lorawgpu.files.paths import absolute

MAX_EXPLAINED = 100  # problems in our own words: finding the nearest key takes milliseconds
READ_PATHS = {"base_model": True, "adapter": False, "lora_model_dir": False}  # key: may it be a hub name?
WRITTEN_PATHS = ("output_dir", "dataset_prepared_path")


def load_config(source: str | Path | Mapping, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a config file, or a dict of its keys (`config.mapping`), and apply `--set` overrides (`key=value`).

    UserError with all problems of the file in one message, each with its line: unknown keys, wrong values, keys that
    do not go together, paths that do not exist. No file that the config names is opened.
    """
    return load_config_and_notes(source, overrides)[0]


def load_config_and_notes(config: str | Path | Mapping, overrides: Sequence[str] = ()) -> tuple[TrainConfig, Notes]:
    """The same, with what to tell about a file that is written for axolotl."""
    given = isinstance(config, Mapping)
    path = Path(NAME if given else config)
    source = read_mapping(config) if given else read_yaml(path)
    overridden = [apply_override(source.data, text) for text in overrides]
    translated = translate(source.data, source.lines, list(TrainConfig.model_fields))
    elsewhere, meant = take_other_names(source.data)
    problems = source.problems + translated.problems + elsewhere
    problems += _resolve_paths(source.data, [Path.cwd(), path.absolute().parent])
    checked, wrong = _validate(source.data, meant)
    problems += wrong
    if problems:
        raise UserError(format_problems(path, problems, source.lines, overridden))
    notes = [*translated.notes, *_alpha_note(checked)]
    return checked, Notes(tuple(notes), translated.optimizer)


def _alpha_note(config: TrainConfig) -> list[str]:
    """Other tools derive alpha from the rank, or have another default, so a file that leaves it out means another
    scale."""
    if "lora_r" not in config.model_fields_set or "lora_alpha" in config.model_fields_set or config.start_from:
        return []
    alpha, r = config.lora_alpha, config.lora_r
    if alpha == 2 * r:
        return []
    others = f"LLaMA-Factory: twice the rank, {2 * r}; Unsloth: 16; PEFT: 8"
    return [f"lora_alpha is not set: {alpha}, our default ({others})"]


def _resolve_paths(data: dict[str, Any], folders: list[Path]) -> list[ConfigProblem]:
    """Make the paths in `data` absolute, in place; values that are not strings are left to the schema."""
    problems = []

    def resolve(holder: Any, key: str, where: Location, hub: bool) -> None:
        value = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(value, str) or not value or key == "adapter" and value in METHODS:
            return
        try:
            holder[key] = find_path(value, folders, hub)
        except ValueError as error:
            problems.append(ConfigProblem(where, f"{dotted(where)}: {error}"))

    for key, hub in READ_PATHS.items():
        resolve(data, key, (key,), hub)
    for key in ("datasets", "test_datasets"):
        for index, item in enumerate(data[key] if isinstance(data.get(key), list) else []):
            resolve(item, "path", (key, index, "path"), True)
    template = data.get("chat_template_jinja")
    if isinstance(template, str) and "{" not in template:  # else it is the template itself
        resolve(data, "chat_template_jinja", ("chat_template_jinja",), False)
    data.setdefault("output_dir", TrainConfig.model_fields["output_dir"].default)
    for key in WRITTEN_PATHS:
        if isinstance(data.get(key), str) and data[key]:
            try:
                data[key] = absolute(data[key])
            except ValueError as error:
                problems.append(ConfigProblem((key,), f"{key}: {error}"))
                continue
            if os.path.exists(data[key]) and not os.path.isdir(data[key]):
                problems.append(ConfigProblem((key,), f"{key}: {data[key]!r} is a file; wanted a folder"))
    return problems


def _sibling_keys(where: Location) -> Sequence[str]:
    section = TrainConfig if len(where) == 1 else SpecialTokens if where[0] == "special_tokens" else DataSet
    return list(section.model_fields)


def _validate(data: dict[str, Any], meant: set[str]) -> tuple[TrainConfig | None, list[ConfigProblem]]:
    """The config, or its problems: those of single keys, then those of combinations of the remaining ones.

    A key in `meant` is not missing: it is there under another name.
    """
    problems, good = [], data
    try:
        config = TrainConfig.model_validate(data, context={"keys_alone": True})
    except ValidationError as error:
        config = None
        errors = error.errors(include_url=False)
        errors = [e for e in errors if not (e["type"] == "missing" and e["loc"][0] in meant)]
        problems = [explain(e, _sibling_keys) for e in errors[:MAX_EXPLAINED]]
        problems += [ConfigProblem(tuple(e["loc"]), e["msg"]) for e in errors[MAX_EXPLAINED:]]
        wrong = {problem.where[0] for problem in problems}
        good = {key: value for key, value in data.items() if key not in wrong}
        stand_ins = {"base_model": "-", "datasets": [{"path": "-"}]}
        config_of_good = TrainConfig.model_validate(stand_ins | good, context={"keys_alone": True})
    else:
        wrong, config_of_good = set(), config
    for keys, text in config_of_good.combination_problems():
        if not keys & wrong:
            set_here = [key for key in data if key in keys]
            problems.append(ConfigProblem((set_here[-1],), text))
    return config, problems
