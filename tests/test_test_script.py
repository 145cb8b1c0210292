"""`scripts/test.sh`: what its last line and its exit code say, with stand-ins for ruff and the tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(os.name == "nt", reason="a script of bash")
@pytest.mark.parametrize(("ruff", "tests", "code"), [(0, 0, 0), (1, 0, 1), (0, 4, 4), (1, 4, 4)])
def test_a_failure_of_ruff_is_the_last_line(tmp_path, ruff, tests, code):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/test.sh", "scripts/setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tools.parent / "installed-dev.toml")  # nothing to install
    python = f'case "$*" in *pytest*) echo "7 passed"; exit {tests} ;; esac'
    for name, text in (("ruff", f"exit {ruff}"), ("python", python)):
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/test.sh"], cwd=tmp_path, env=os.environ | {"VENV": str(tools.parent)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last = done.stdout.splitlines()[-1]
    assert done.returncode == code, done.stdout
    assert last == ("ruff: failed (see the top of this output)" if ruff else "7 passed")
