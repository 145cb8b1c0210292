"""Where a config's values come from: a YAML file with its line numbers, `--set` overrides, paths found on disk.

Nothing here knows a key of the schema (lorawgpu/config.py).
"""

import glob
import math
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lorawgpu.errors import UserError
from lorawgpu.util.suggest import nearest

MAX_BYTES = 1 << 20  # no config is larger; a data file passed by mistake is
MAX_DEPTH = 4  # of line numbers; the schema is two levels deep
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
MAX_PROBLEMS = 10  # that a message lists, each with at most MAX_TEXT characters
MAX_TEXT = 400


class _Short(reprlib.Repr):
    """Two levels only: aliases can make a value that takes for ever to print."""

    maxlevel = 2

    def repr_int(self, value: int, level: int) -> str:
        """Python prints no number of more than some thousand digits."""
        bits = value.bit_length()
        return super().repr_int(value, level) if bits < 1000 else f"<a number of {bits} bits>"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()  # as YAML spells it

    def repr_NoneType(self, value: None, level: int) -> str:
        return "nothing"


_SHORT = _Short()
# What pydantic says of some mistakes is Python's, not a user's.
_WANTED = {"bool_type": "wanted true or false", "too_short": "wanted at least one"}
_FILE_SUFFIXES = {".csv", ".gguf", ".gz", ".jinja", ".json", ".jsonl", ".parquet", ".safetensors", ".txt", ".zst"}

_TEXT = "tag:yaml.org,2002:str"  # what a key of a config must be

Location = tuple[str | int, ...]


class Problem(NamedTuple):
    where: Location  # ("datasets", 0, "path")
    text: str


class YamlSource(NamedTuple):
    data: dict[str, Any]
    lines: dict[Location, int]  # first line of each key and list item, counted from 1
    problems: list[Problem]


def read_yaml(path: Path) -> YamlSource:
    """Read a mapping. UserError, with file and line, for what is not UTF-8, not YAML or not a mapping."""
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else None
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror}") from None
    if raw is None:
        raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes; wanted a YAML config, is this the data?")
    try:
        loader = yaml.SafeLoader(raw.decode("utf-8-sig"))
        node = loader.get_single_node()
        lines: dict[Location, int] = {}
        problems: list[Problem] = []
        _walk(node, (), lines, problems)
        data = None if node is None else loader.construct_document(node)
        problems += _odd_keys(node)  # construction put what is merged (`<<`) among the keys
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if error.context == "expected a single document in the stream":
            raise UserError(f"{path}{line}: a second YAML document begins here; wanted one, without `---`") from None
        raise UserError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        raise UserError(f"{path}: not YAML: {str(error) or type(error).__name__}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {_kind(data)}; wanted `key: value` lines")
    return YamlSource({key: value for key, value in data.items() if isinstance(key, str)}, lines, problems)


def _odd_keys(node) -> list[Problem]:
    """Keys that YAML reads as no text, such as `on` or `1.5`."""
    keys = [key for key, _ in node.value if key.tag != _TEXT] if isinstance(node, yaml.MappingNode) else []
    read_as = [(key.value if isinstance(key, yaml.ScalarNode) else "?", key.tag.rpartition(":")[2]) for key in keys]
    return [Problem((key,), f"{key}: unknown key; YAML reads it as {kind}, no text") for key, kind in read_as]


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _walk(node, where: Location, lines: dict[Location, int], problems: list[Problem]) -> None:
    """Note the line of every key and item, and every key that is there twice (YAML would take the last silently)."""
    if len(where) >= MAX_DEPTH:
        return
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[where + (index,)] = item.start_mark.line + 1
            _walk(item, where + (index,), lines, problems)
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            here = where + (key.value if isinstance(key, yaml.ScalarNode) else "?",)
            if here in seen:
                problems.append(Problem(here, f"{dotted(here)}: set twice, here and on line {lines[here]}"))
                lines[here] = key.start_mark.line + 1
                continue
            seen.add(here)
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, problems)


def dotted(where: Location) -> str:
    return ".".join(str(part) for part in where)


def apply_override(data: dict[str, Any], text: str) -> Location:
    """Set `key=value` (a value in YAML, a key such as `datasets.0.path`) in `data`; return the key as a location.

    What is no YAML (`*.csv`, `{{ a }}`: a shell has taken the quotes) is text, which the schema may then refuse. An
    index one past the end of a list appends. UserError for anything that cannot be set.
    """
    key, equals, value_text = text.partition("=")
    where = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    if not equals or "" in where:
        raise UserError(f"--set {text}: wanted key=value, such as learning_rate=1e-4 or datasets.0.path=chats.jsonl")
    try:
        value = yaml.safe_load(value_text)
    except (yaml.YAMLError, RecursionError, ValueError):
        value = value_text
    target: Any = data
    for depth, part in enumerate(where):
        fits = isinstance(target, list) if isinstance(part, int) else isinstance(target, dict)
        if not fits or (isinstance(part, int) and part > len(target)):
            raise UserError(f"--set {text}: {_lacks(target, dotted(where[:depth]) or 'the config', part)}")
        if isinstance(part, int) and part == len(target):
            target.append(None)
        if depth == len(where) - 1:
            target[part] = value
        else:
            if isinstance(part, str):
                target.setdefault(part, None)
            if target[part] is None:
                target[part] = [] if isinstance(where[depth + 1], int) else {}
            target = target[part]
    return where


def _lacks(target: Any, name: str, part: str | int) -> str:
    """Why `part` is no place to set in `target`."""
    if not isinstance(target, list | dict):
        return f"{name} is {_SHORT.repr(target)}, which has no entry {part!r}"
    if isinstance(target, dict):
        return f"{name} has keys and no entry {part!r}"
    if isinstance(part, str):
        return f"{name} is a list: wanted a number where {part!r} is, such as {name}.0"
    held = "it has none" if not target else f"it has {len(target)}, counted from 0"
    return f"{name} has no entry {part}: {held}, and {len(target)} adds one"


def find_path(value: str, folders: list[Path], hub: bool) -> str:
    """The absolute path of what `value` names in the first of `folders` that has it (globs included).

    `builtin:NAME` stays as it is, and with `hub` so does what can only be owner/name. ValueError when nothing is there.
    """
    if value.startswith("builtin:"):
        return value
    for folder in folders:
        candidate = os.path.abspath(folder / Path(value).expanduser())
        if os.path.exists(candidate) or glob.has_magic(candidate) and glob.glob(candidate, recursive=True):
            return candidate
    if hub and _HUB_NAME.fullmatch(value) and Path(value).suffix.lower() not in _FILE_SUFFIXES:
        return value
    looked = "" if Path(value).expanduser().is_absolute() else f" in {' or '.join(dict.fromkeys(map(str, folders)))}"
    raise ValueError(f"{value!r} does not exist{looked}" + ("; a hub name is owner/name" if hub else ""))


def message(path: Path, problems: Sequence[Problem], lines: dict[Location, int], touched: list[Location]) -> str:
    """All problems of a file in one text, by line; `touched` are the keys that came from `--set` instead."""

    def line_of(where: Location) -> float:
        """Of the innermost key that has one; infinity: set by --set; 0: the file says nothing of it."""
        for end in range(len(where), 0, -1):
            if where[:end] in touched or where[:end] not in lines and where[:end] in made:
                return math.inf
            if where[:end] in lines:
                return lines[where[:end]]
        return 0

    made = {where[:end] for where in touched for end in range(1, len(where))}  # keys that --set went through
    texts = []
    for problem in sorted(dict.fromkeys(problems), key=lambda problem: line_of(problem.where)):
        line = line_of(problem.where)
        place = "--set: " if line == math.inf else f"line {line}: " if line else ""
        texts.append(place + (problem.text if len(problem.text) <= MAX_TEXT else problem.text[:MAX_TEXT] + "..."))
    if len(texts) == 1:
        return f"{path}: {texts[0]}"
    more = [f"and {len(texts) - MAX_PROBLEMS} more"] if len(texts) > MAX_PROBLEMS else []
    return "\n  ".join([f"{path}: {len(texts)} problems", *texts[:MAX_PROBLEMS], *more])


def explain(
    error: dict[str, Any], keys_beside: Callable[[Location], Sequence[str]], synonyms: dict[str, str]
) -> Problem:
    """One of pydantic's errors in words: the key, what it got, what was wanted.

    An unknown key is answered with its synonym or else the nearest of `keys_beside(location)`, where one is near.
    """
    where = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        key = str(where[-1])
        meant = synonyms.get(key) or nearest(key, keys_beside(where))
        hint = f"the nearest one is {meant!r}" if meant else "`lorawgpu train --schema` lists all"
        return Problem(where, f"{dotted(where)}: unknown key; {hint}")
    if error["type"] == "missing":
        return Problem(where, f"{dotted(where)}: missing, and it has no default")
    if error["type"] == "invalid_key":
        return Problem(where, f"{dotted(where[:-1])}: the key {_SHORT.repr(error['input'])} is no text")
    wanted = _WANTED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return Problem(where, f"{dotted(where)}: got {_SHORT.repr(error['input'])}; {wanted[0].lower()}{wanted[1:]}")
