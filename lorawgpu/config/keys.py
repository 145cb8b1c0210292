"""The keys of a config as a table for people: `lorawgpu train --keys [WORD]`."""

import textwrap
from collections.abc import Iterator

from pydantic_core import PydanticUndefined

from lorawgpu.config.axolotl import DATA_MISSING, DATA_WITHOUT_EFFECT, MISSING, WITHOUT_EFFECT
from lorawgpu.config.schema import TrainConfig
from lorawgpu.config.types import DataSet, Section
from lorawgpu.errors import UserError

WIDTH = 120


def keys_table(word: str) -> str:
    """Our keys with default and meaning whose line contains `word`, and axolotl's keys whose name does, if it is not
    empty. UserError if there are none."""
    rows = [row for row in [*_rows(TrainConfig), *_rows(DataSet, "datasets.")] if word.lower() in " ".join(row).lower()]
    theirs = [row for row in _verdicts() if word and word.lower() in row[0].lower()]
    if not rows and not theirs:
        raise UserError(f"--keys {word}: no key has this word; `lorawgpu train --keys` lists all")
    return "\n".join(_lines(rows, ("key", "default", "meaning")) + ([""] if rows and theirs else []) + _lines(theirs))


def _rows(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in section.model_fields.items():
        default = "required" if field.default is PydanticUndefined else _shown(field.default)
        yield prefix + name, default, " ".join((field.description or "").split())


def _shown(default: object) -> str:
    if default in (None, [], {}) or isinstance(default, Section):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _verdicts() -> Iterator[tuple[str, str, str]]:
    for table, verdict in ((WITHOUT_EFFECT, "no effect"), (MISSING, "missing")):
        yield from ((f"{key} (axolotl)", verdict, text) for key, text in table.items())
    for table, verdict in ((DATA_WITHOUT_EFFECT, "no effect"), (DATA_MISSING, "missing")):
        yield from ((f"datasets.{key} (axolotl)", verdict, text) for key, text in table.items())


def _lines(rows: list[tuple[str, str, str]], head: tuple[str, str, str] | None = None) -> list[str]:
    """Two columns as wide as they need, and the third one wrapped."""
    rows = [*([head] if head and rows else []), *rows]
    first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    indent = " " * (first + second + 4)
    lines = []
    for key, default, meaning in rows:
        start = f"{key:<{first}}  {default:<{second}}  "
        parts = textwrap.wrap(meaning, max(30, WIDTH - len(indent)), break_on_hyphens=False) or [""]
        lines += [f"{start if n == 0 else indent}{part}".rstrip() for n, part in enumerate(parts)]
    return lines
