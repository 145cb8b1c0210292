"""docs/limits.md says what the source says; an input at each limit is taken, and one beyond it is not."""

import importlib
import re
from pathlib import Path

import pytest
from limit_cases import CASES, ELSEWHERE, LOWERED

from lorawgpu.errors import UserError

PAGE = (Path(__file__).parent.parent / "docs" / "limits.md").read_text("utf-8")
ROWS = re.findall(r"^\| (.+?) \| ([\d.]+)( \S+.*?)? \| `([\w.]+)\.(\w+)(?:\[(.+?)\])?` \| (.+?) \|$", PAGE, re.M)


def test_every_row_of_the_page_is_read():
    assert len(ROWS) == sum(line.startswith("| ") and "| where |" not in line for line in PAGE.splitlines()) > 30


@pytest.mark.parametrize(("what", "limit", "_", "module", "name", "key", "beyond"), ROWS, ids=[row[0] for row in ROWS])
def test_a_limit_is_the_one_in_the_source(what, limit, _, module, name, key, beyond):
    value = getattr(importlib.import_module(f"lorawgpu.{module}"), name)
    if key:
        value = value[int(key) if key.isdigit() else key.strip('"')]
    assert value == float(limit), what


def place(row) -> str:
    return f"{row[3]}.{row[4]}" + (f"[{row[5]}]" if row[5] else "")


LIMITS = {place(row): int(row[1]) for row in ROWS}


def test_every_limit_is_tried():
    """Those of requests in tests of `serve`, which sends them."""
    files = {where for where in LIMITS if not where.startswith("serve.")}
    assert files == CASES.keys() | ELSEWHERE.keys() and not CASES.keys() & ELSEWHERE.keys()
    for test in ELSEWHERE.values():
        file, name = test.split(": ")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text("utf-8"), test


def said(case, folder: Path, size: int) -> str:
    try:
        return case(folder, size) or ""
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("where", CASES)
def test_at_the_limit_and_beyond(tmp_path, monkeypatch, where):
    (case, words), limit = CASES[where], LIMITS[where]
    if where in LOWERED:
        limit = LOWERED[where]
        monkeypatch.setattr(f"lorawgpu.{where}", limit)
    at, beyond = tmp_path / "at", tmp_path / "beyond"
    at.mkdir()
    beyond.mkdir()
    assert said(case, at, limit) == ""
    assert words in said(case, beyond, limit + 1)
