"""Which files of a folder or hub data set are meant: by the names of files, or by a configuration of its card.

https://huggingface.co/docs/hub/datasets-manual-configuration: `configs` in the YAML at the top of README.md.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lorawgpu.data.read_files import SUFFIXES
from lorawgpu.data.splits import Files, same_split
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

CARD = "README.md"
KINDS = {"json": (".jsonl", ".ndjson", ".json"), "csv": (".csv",), "parquet": (".parquet",)}  # names of `datasets`
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where it is there, is ten times as fast
MAX_CARD = 1 << 20  # characters in which its YAML is looked for


@dataclass(frozen=True)
class Within:
    """What of a folder or hub data set is meant. `name`: its configuration; `data_files`: names or globs; `ds_type`:
    the kind of its files, which a single file must be of too."""

    name: str | None = None
    revision: str | None = None
    data_files: tuple[str, ...] = ()
    ds_type: str | None = None

    def keys(self) -> list[str]:
        return [key for key, value in vars(self).items() if value and key != "ds_type"]

    @property
    def suffixes(self) -> tuple[str, ...]:
        return KINDS[self.ds_type] if self.ds_type else SUFFIXES


def narrowed(
    files: Sequence[Path], folder: Path, within: Within, splits: Sequence[str], card: Callable[[], str]
) -> tuple[list[Path], Files | None]:
    """The files that are meant; and, if the card says which splits they are, those of the first of `splits` it has.

    `card`: the text of README.md. UserError if nothing is left.
    """
    inside = {file: file.relative_to(folder).as_posix() for file in files}
    of_split, name, text = None, within.name, ""
    if name or not within.data_files:
        text = card()
        name = name or _default(text, folder)
    if name:
        by_split = _configured(inside, name, text, folder)
        inside = {file: inside[file] for files in by_split.values() for file in files}
        if None not in by_split:
            of_split = _first(by_split, splits, name, folder)
    if within.data_files:
        for pattern in within.data_files:
            if not any(matches(name, pattern) for name in inside.values()):
                raise UserError(f"data set {folder}: no file is named {pattern}; it has {_names(inside.values())}")
        inside = {f: name for f, name in inside.items() if any(matches(name, glob) for glob in within.data_files)}
        of_split = None
    return list(inside), of_split


def _default(card: str, folder: Path) -> str | None:
    """The configuration that a card says is meant where none is named: the only one, that with `default: true`, or that
    of the name `default`. UserError if it has several and no default; None if it has none, or cannot be read."""
    try:
        configs = {str(c["config_name"]): c for c in _configs(card, folder) if "config_name" in c}
    except UserError:
        return None
    marked = [name for name, config in configs.items() if config.get("default") is True]
    if found := marked or [name for name in configs if name == "default" or len(configs) == 1]:
        return found[0]
    if configs:
        raise UserError(
            f"data set {folder}: it has the configurations {_names(configs)}, and no default: choose with "
            f"`name: {min(configs)}`, several with a list, or choose files with data_files"
        )
    return None


def _configured(inside: dict[Path, str], name: str, card: str, folder: Path) -> dict[str | None, list[Path]]:
    """The files of a configuration by split: as the card has them, or those in a folder of that name, split None."""
    configs = {str(c["config_name"]): c for c in _configs(card, folder) if "config_name" in c}
    if name in configs:
        found = {
            split: [file for file, path in inside.items() if any(matches(path, p) for p in patterns)]
            for split, patterns in _patterns(configs[name]).items()
        }
    else:
        found = {None: [file for file, path in inside.items() if name in path.split("/")[:-1]]}
    if not any(found.values()):
        folders = sorted({path.split("/")[0] for path in inside.values() if "/" in path})
        known = _names(configs or folders) or "none"
        raise UserError(f"data set {folder}: no files of the configuration (name) {name}; it has {known}")
    return {split: files for split, files in found.items() if files}


def _configs(card: str, folder: Path) -> list[dict[str, Any]]:
    found = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---", card[:MAX_CARD], re.DOTALL)
    try:
        data = yaml.load(found[1], _LOADER) if found else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = brief(str(error).splitlines()[0] if str(error) else "")
        raise UserError(
            f"data set {folder}: the YAML of {CARD} cannot be read ({what}); name its files as data_files"
        ) from None
    configs = data.get("configs") if isinstance(data, dict) else None
    return [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []


def _patterns(config: dict[str, Any]) -> dict[str | None, list[str]]:
    """The globs of a configuration's files, by split; None for those of no split."""
    base = f"{config['data_dir'].strip('/')}/" if isinstance(config.get("data_dir"), str) else ""
    out: dict[str | None, list[str]] = {}
    for item in _listed(config.get("data_files", "**")):
        split, paths = (item.get("split"), item.get("path")) if isinstance(item, dict) else (None, item)
        out.setdefault(split, []).extend(base + path for path in _listed(paths) if isinstance(path, str))
    return out


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _first(by_split: dict[str, list[Path]], splits: Sequence[str], name: str, folder: Path) -> Files:
    for wanted in splits:
        if split := next((s for s in by_split if same_split(str(s), wanted)), None):
            return Files(by_split[split], (), tuple(f for s, files in by_split.items() if s != split for f in files))
    known = _names(map(str, by_split))
    raise UserError(f"data set {folder}: the configuration {name} has no split {' or '.join(splits)}; it has {known}")


def _names(names: Sequence[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def matches(name: str, pattern: str) -> bool:
    """Whether a glob names the path `name`: `*` and `?` stay within a folder, `**` does not."""
    parts, globs = name.split("/"), pattern.removeprefix("./").split("/")

    @cache
    def rest(part: int, glob: int) -> bool:
        if glob == len(globs):
            return part == len(parts)
        if globs[glob] == "**":
            return rest(part, glob + 1) or part < len(parts) and rest(part + 1, glob)
        return part < len(parts) and fnmatchcase(parts[part], globs[glob]) and rest(part + 1, glob + 1)

    return rest(0, 0)
