"""Every error that a user can cause: exit code 2, one message that says what, no traceback.

The table is tests/catalogue. What stands in the way of `train` itself (configs, resuming, the device) is in
tests/test_errors.py.
"""

import pytest
from catalogue import adapters, commands, data, models

from lorawgpu import cli

TABLES = {"model": models, "adapter": adapters, "data": data, "command": commands}
CASES = {f"{kind}: {name}": case for kind, table in TABLES.items() for name, case in table.CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_clear_message(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path / "cache"))
    build, words = CASES[name]
    assert cli.main([str(part) for part in build(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\nerror: ") == 0 and "Traceback" not in err
    assert words in err, err
    assert len(err) < 1500
