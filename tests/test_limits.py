"""docs/limits.md says what the source says."""

import importlib
import re
from pathlib import Path

import pytest

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
