"""A config given as a Python dict instead of a file: the keys of the YAML, with paths and records as objects."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lorawgpu.config.source import ConfigProblem, ParsedYaml
from lorawgpu.data.records import write_records
from lorawgpu.files.paths import default_cache_dir
from lorawgpu.files.untrusted import brief

NAME = "config"  # in messages


def read_mapping(config: Mapping) -> ParsedYaml:
    """The config as plain values, which the caller may change. Records in `datasets` and `test_datasets` become files.

    UserError for records that are no JSON.
    """
    wrong = [key for key in config if type(key) is not str]
    problems = [ConfigProblem((str(key),), f"{brief(key)}: unknown key; wanted a string") for key in wrong]
    data = {key: value for key, value in config.items() if type(key) is str}
    given = data.get("dataset_prepared_path")
    cache = Path(given) if isinstance(given, str | os.PathLike) else default_cache_dir()
    for key in ("datasets", "test_datasets"):
        if key in data:
            data[key] = _data_sets(key, data[key], cache)
    return ParsedYaml(_plain(data), {}, problems)


def _data_sets(key: str, value: Any, cache: Path | None) -> Any:
    """A list of data sets: `value` itself, or one of the records that it is. A `path` may be records too, and texts.

    A string among data sets is none of these: it is most likely the name of a file, which the schema explains.
    """
    if not _is_list(value):
        return value
    items = list(value)
    if items and not any(_is_data_set(item) for item in items):
        return [{"path": write_records(key, items, cache)}]
    for number, item in enumerate(items):
        path = item.get("path") if isinstance(item, Mapping) else None
        if _is_list(path):
            items[number] = {**item, "path": write_records(f"{key}.{number}.path", list(path), cache)}
    return items


def _is_data_set(item: Any) -> bool:
    return not isinstance(item, Mapping) or "path" in item


def _is_list(value: Any) -> bool:
    """Also a data set of another library, whose items are records."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | os.PathLike)


def _plain(value: Any) -> Any:
    """As YAML would have it: a copy of dicts and lists, paths as strings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
