"""Every error that a user can cause: exit code 2, one message that says what, no traceback.

The table is tests/catalogue. What stands in the way of `train` itself (configs, resuming, the device) is in
tests/test_errors.py.
"""

import ast
import sys
from pathlib import Path

import pytest
from catalogue import adapters, commands, data, models, training
from catalogue.elsewhere import ELSEWHERE

from lorawgpu import cli
from lorawgpu.errors import UserError

PACKAGE = Path(cli.__file__).parent

TABLES = {"model": models, "adapter": adapters, "data": data, "command": commands, "train": training}
CASES = {f"{kind}: {name}": case for kind, table in TABLES.items() for name, case in table.CASES.items()}


HELPERS = ("bad_line", "bomb")  # functions that make an error for the line that raises it
RAISED = set()  # (file, line) of every error that a case ended in
TRIED = set()


@pytest.fixture(autouse=True)
def raised(monkeypatch):
    """Notes where each error comes from."""

    def note(error, *args):
        frame = sys._getframe(1)
        while frame.f_code.co_name in HELPERS:
            frame = frame.f_back
        RAISED.add((frame.f_code.co_filename, frame.f_lineno))

    monkeypatch.setattr(UserError, "__init__", note)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_clear_message(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path / "cache"))
    TRIED.add(name)
    build, words = CASES[name]
    assert cli.main([str(part) for part in build(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\nerror: ") == 0 and "Traceback" not in err
    assert words in err, err
    assert len(err) < 1500


ERRORS = ("UserError", "TemplateFailed", "NeedsTokenizer", *HELPERS)
FAILURES = ("CheckFailed", "DeviceError")  # exit codes 1 and 3: faults of a run or a device, injected by other tests


def sites(kinds):
    """Every `raise` of these in the package: (file:function, file, lines, text)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    if ast.unparse(node.exc.func) in kinds:
                        place = f"{path.relative_to(PACKAGE).as_posix()}:{function.name}"
                        yield place, str(path), range(node.lineno, node.end_lineno + 1), ast.unparse(node.exc)


def excused(place):
    """Where in `ELSEWHERE` a place is, itself or with its whole file."""
    return place in ELSEWHERE or place.split(":")[0] in ELSEWHERE


def test_every_error_is_in_the_catalogue_or_listed_with_its_test():
    """A new error belongs into tests/catalogue, or with a reason into catalogue/elsewhere.py."""
    if TRIED != set(CASES):
        pytest.skip("only a part of the catalogue was run")
    missing = [
        f"{place}: {text[:120]}"
        for place, file, lines, text in sites(ERRORS)
        if not excused(place) and not any((file, line) in RAISED for line in lines)
    ]
    assert not missing, "\n".join(missing)


def test_every_failure_that_has_to_be_injected_is_listed():
    assert not [place for place, *_ in sites(FAILURES) if not excused(place)]


def test_the_list_is_of_places_and_tests_that_exist():
    places = {place for place, *_ in sites(ERRORS + FAILURES)}
    assert not [p for p in ELSEWHERE if p not in places and not any(q.startswith(p + ":") for q in places)]
    tests = {where.split()[0].rstrip(":") for where in ELSEWHERE.values() if where.startswith("test_")}
    assert not [test for test in tests if not (Path(__file__).parent / test).exists()]
