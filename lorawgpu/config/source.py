"""Reading a config's values: a YAML file with its line numbers, `--set` overrides, and paths looked up on disk.

Nothing here knows the keys of the schema.
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
from lorawgpu.files.hub import GGUF_ON_HUB, is_hub_name
from lorawgpu.files.ollama import PREFIX
from lorawgpu.files.paths import absolute, expand
from lorawgpu.files.untrusted import decoded
from lorawgpu.util.suggest import nearest

MAX_BYTES = 1 << 20  # no config is larger, but a data file passed by mistake is
MAX_DEPTH = 4  # of keys whose line is recorded; the schema is two levels deep
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
MAX_PROBLEMS = 10  # in a message
MAX_TEXT = 1000  # characters of a problem


class _Short(reprlib.Repr):
    """Prints only two levels: YAML aliases can make a value that takes forever to print."""

    maxlevel = 2

    def repr_int(self, value: int, level: int) -> str:
        """Python does not print numbers of more than a few thousand digits."""
        bits = value.bit_length()
        return super().repr_int(value, level) if bits < 1000 else f"<a number of {bits} bits>"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()  # as YAML spells it

    def repr_NoneType(self, value: None, level: int) -> str:
        return "nothing"


_SHORT = _Short()
# Instead of messages of pydantic that only a Python programmer would understand.
_WANTED = {"bool_type": "wanted true or false", "too_short": "wanted at least one"}
_FILE_SUFFIXES = {".csv", ".gguf", ".gz", ".jinja", ".json", ".jsonl", ".parquet", ".safetensors", ".txt", ".zst"}

# What PyYAML raises for values that do not fit their tags (a date such as 2024-99-99, `!!bool maybe`, `!!timestamp x`).
BAD_YAML = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError)
MISFIT = "a value does not fit its tag, or is nested too deeply"
MAX_INDEX = 9  # digits of an index in a list

_STRING_TAG = "tag:yaml.org,2002:str"

Location = tuple[str | int, ...]


class ConfigProblem(NamedTuple):
    where: Location  # ("datasets", 0, "path")
    text: str


class ParsedYaml(NamedTuple):
    data: dict[str, Any]
    lines: dict[Location, int]  # first line of each key and list item, from 1
    problems: list[ConfigProblem]


def read_yaml(path: Path) -> ParsedYaml:
    """Read a YAML mapping. UserError, with file and line, unless it is UTF-8, YAML and a mapping."""
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else None
    except OSError as error:
        raise UserError(f"{path}: cannot read the config: {error.strerror}") from None
    if raw is None:
        raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes; wanted a YAML config (is this the data?)")
    try:
        node = None
        loader = yaml.SafeLoader(decoded(raw))
        node = loader.get_single_node()
        lines: dict[Location, int] = {}
        problems: list[ConfigProblem] = []
        _walk(node, (), lines, problems)
        data = None if node is None else loader.construct_document(node)
        problems += _non_string_keys(node)  # after construction, which has resolved merge keys (`<<`)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}: save the file as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = _mark(error)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if error.context == "expected a single document in the stream":
            raise UserError(f"{path}{line}: a second YAML document starts here; wanted just one, no `---`") from None
        what = "what begins here does not end: " if mark and mark is error.context_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {what}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:  # `position` counts characters
        line = decoded(raw)[: error.position].count("\n") + 1
        raise UserError(f"{path}, line {line}: not valid YAML: a character that YAML does not allow") from None
    except BAD_YAML as error:
        line = next((f", line {line}" for line in [_bad_value(node)] if line), "")
        what = str(error) if isinstance(error, yaml.YAMLError | ValueError) else ""
        raise UserError(f"{path}{line}: not valid YAML: {what or MISFIT}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: contains {_kind(data)}; wanted `key: value` lines")
    return ParsedYaml({key: value for key, value in data.items() if isinstance(key, str)}, lines, problems)


def _mark(error: yaml.MarkedYAMLError):
    """Where the fault is: of what was begun and not ended its beginning, not the place where the parser gave up."""
    unfinished = ("while scanning a quoted scalar", "while parsing a flow", "while scanning a simple key")
    if error.context_mark and str(error.context).startswith(unfinished):
        return error.context_mark
    return error.problem_mark or error.context_mark


def _bad_value(node) -> int | None:
    """The line of the first value that YAML cannot make what it looks like, such as a date."""
    pending = [node]
    while pending:
        node = pending.pop(0)
        if isinstance(node, yaml.ScalarNode):
            try:
                yaml.SafeLoader("").construct_document(node)
            except BAD_YAML:
                return node.start_mark.line + 1
        elif node is not None and len(pending) < MAX_BYTES:
            pending += [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
    return None


def _non_string_keys(node) -> list[ConfigProblem]:
    """Keys that are not strings in YAML, such as `on` or `1.5`."""
    keys = [key for key, _ in node.value if key.tag != _STRING_TAG] if isinstance(node, yaml.MappingNode) else []
    read_as = [(key.value if isinstance(key, yaml.ScalarNode) else "?", key.tag.rpartition(":")[2]) for key in keys]
    return [
        ConfigProblem((key,), f"{key}: unknown key; YAML reads it as {kind}, not a string") for key, kind in read_as
    ]


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _walk(node, where: Location, lines: dict[Location, int], problems: list[ConfigProblem]) -> None:
    """Record the line of every key and item, and duplicate keys (YAML would silently use the last one)."""
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
                problems.append(ConfigProblem(here, f"{dotted(here)}: set twice, here and on line {lines[here]}"))
                lines[here] = key.start_mark.line + 1
                continue
            seen.add(here)
            lines[here] = key.start_mark.line + 1
            _walk(value, here, lines, problems)


def dotted(where: Location) -> str:
    return ".".join(str(part) for part in where)


def apply_override(data: dict[str, Any], text: str) -> Location:
    """Set `key=value` (a key such as `datasets.0.path`, a value in YAML) in `data`; return the key as a location.

    A value that is not YAML (`*.csv`, `{{ a }}`: the shell ate the quotes) is a string, which the schema may reject.
    An index one past the end of a list appends. UserError for a key that cannot be set.
    """
    key, equals, value_text = text.partition("=")
    where = tuple(int(part) if part.isdecimal() and len(part) <= MAX_INDEX else part for part in key.strip().split("."))
    if not equals or "" in where:
        raise UserError(f"--set {text}: wanted key=value, such as learning_rate=1e-4 or datasets.0.path=chats.jsonl")
    try:
        value = yaml.safe_load(value_text)
    except BAD_YAML:
        value = value_text
    target: Any = data
    for depth, part in enumerate(where):
        fits = isinstance(target, list) if isinstance(part, int) else isinstance(target, dict)
        if not fits or (isinstance(part, int) and part > len(target)):
            raise UserError(f"--set {text}: {_why_not_settable(target, dotted(where[:depth]) or 'the config', part)}")
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


def _why_not_settable(target: Any, name: str, part: str | int) -> str:
    if not isinstance(target, list | dict):
        return f"{name} is {_SHORT.repr(target)}, which has no entry {part!r}"
    if isinstance(target, dict):
        return f"{name} has keys, not an entry {part!r}"
    if isinstance(part, str):
        return f"{name} is a list; wanted a number instead of {part!r}, such as {name}.0"
    size = "it is empty" if not target else f"it has {len(target)}, counted from 0"
    return f"{name} has no entry {part}: {size}; use {len(target)} to add one"


def find_path(value: str, folders: list[Path], hub: bool) -> str:
    """The absolute path of `value` (which may be a glob) in the first of `folders` that has it.

    `builtin:NAME` and `ollama:NAME` are returned unchanged, and so is a hub name if `hub`. ValueError if nothing is
    found.
    """
    if value.startswith(("builtin:", PREFIX)):
        return value
    for folder in folders:
        candidate = absolute(value, folder)
        if os.path.exists(candidate) or glob.has_magic(candidate) and glob.glob(candidate, recursive=True):
            return candidate
    if hub and _HUB_NAME.fullmatch(value) and Path(value).suffix.lower() not in _FILE_SUFFIXES:
        return value
    if hub and value.endswith(".gguf") and value.count("/") > 1 and is_hub_name(value):
        return value
    where = "" if expand(value).is_absolute() else f" in {' or '.join(dict.fromkeys(map(str, folders)))}"
    raise ValueError(f"{value!r} does not exist{where}" + _hub_hint(value, hub))


def _hub_hint(value: str, hub: bool) -> str:
    if not hub:
        return ""
    return f"; {GGUF_ON_HUB[0].lower()}{GGUF_ON_HUB[1:]}" if value.endswith(".gguf") else "; a hub name is owner/name"


def format_problems(
    path: Path, problems: Sequence[ConfigProblem], lines: dict[Location, int], overridden: list[Location]
) -> str:
    """One message for all problems of a file, sorted by line. `overridden`: the keys that were set by `--set`."""

    def line_of(where: Location) -> float:
        """The line of the innermost key that has one; infinity if it comes from --set, 0 if it is in neither."""
        for end in range(len(where), 0, -1):
            if where[:end] in overridden or where[:end] not in lines and where[:end] in parents:
                return math.inf
            if where[:end] in lines:
                return lines[where[:end]]
        return 0

    parents = {where[:end] for where in overridden for end in range(1, len(where))}
    texts = []
    for problem in sorted(dict.fromkeys(problems), key=lambda problem: line_of(problem.where)):
        line = line_of(problem.where)
        prefix = "--set: " if line == math.inf else f"line {line}: " if line else ""
        texts.append(prefix + (problem.text if len(problem.text) <= MAX_TEXT else problem.text[:MAX_TEXT] + "..."))
    if len(texts) == 1:
        return f"{path}: {texts[0]}"
    more = [f"and {len(texts) - MAX_PROBLEMS} more"] if len(texts) > MAX_PROBLEMS else []
    return "\n  ".join([f"{path}: {len(texts)} problems", *texts[:MAX_PROBLEMS], *more])


def explain(error: dict[str, Any], sibling_keys: Callable[[Location], Sequence[str]]) -> ConfigProblem:
    """One of pydantic's errors as a message: the key, the value, what was wanted.

    For an unknown key it names the nearest of `sibling_keys(location)`, if one is near.
    """
    where = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        key = str(where[-1])
        meant = nearest(key, sibling_keys(where))
        hint = f"the nearest one is {meant!r}" if meant else "`lorawgpu train --keys` lists all"
        return ConfigProblem(where, f"{dotted(where)}: unknown key; {hint}")
    if error["type"] == "missing":
        return ConfigProblem(where, f"{dotted(where)}: missing; this key is required")
    if error["type"] == "invalid_key":
        return ConfigProblem(where, f"{dotted(where[:-1])}: the key {_SHORT.repr(error['input'])} is not a string")
    wanted = _WANTED.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    return ConfigProblem(where, f"{dotted(where)}: got {_SHORT.repr(error['input'])}; {wanted[0].lower()}{wanted[1:]}")
