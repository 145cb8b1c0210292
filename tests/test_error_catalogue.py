"""Every error that a user can cause: exit code 2, one message that says what is wrong, no traceback.

The table is tests/catalogue. Errors of `train` itself (configs, resuming, the device) are in tests/test_errors.py.
"""

from pathlib import Path

import pytest
from catalogue import adapters, commands, data, families, models, training
from catalogue.elsewhere import ELSEWHERE
from messages import ERRORS, FAILURES, SourceTree, Template, shown_by

from lorawgpu import cli

TABLES = {
    "model": models,
    "family": families,
    "adapter": adapters,
    "data": data,
    "command": commands,
    "train": training,
}
CASES = {f"{kind}: {name}": case for kind, table in TABLES.items() for name, case in table.CASES.items()}
PRINTED = {}  # by case, its stderr


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_clear_message(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path / "cache"))
    build, words = CASES[name]
    assert cli.main([str(part) for part in build(tmp_path)]) == 2
    out, PRINTED[name] = capsys.readouterr()
    err = PRINTED[name]
    notes = err[: err.index("error: ")].splitlines()
    assert out == "" and all(line.startswith("note: ") for line in notes) and "Traceback" not in err
    assert ("\n" + err).count("\nerror: ") == 1
    assert words in err, err
    assert len(err) < 1500


@pytest.fixture(scope="module")
def source():
    return SourceTree()


def listed(template: Template) -> bool:
    return any(fragment in template.text for fragment in ELSEWHERE)


def lacking(templates) -> str:
    return "\n".join(f'{t.place}: "{t.text}"' for t in templates)


def test_every_error_is_in_the_catalogue_or_listed_with_its_test(source):
    """Runs after all cases: every message in the package's source must have been printed, or be listed."""
    if PRINTED.keys() != CASES.keys():
        pytest.skip("only part of the catalogue was run")
    templates = source.templates(ERRORS)
    shown = set().union(*(shown_by(printed, templates) for printed in PRINTED.values()))
    missing = [t for t in templates if t not in shown and not listed(t)]
    assert not missing, (
        "no case of tests/catalogue prints these messages. Add one, or list a few words of the message in "
        f"catalogue/elsewhere.py with the test that triggers it:\n{lacking(missing)}"
    )


def test_every_failure_that_has_to_be_injected_is_listed(source):
    missing = [t for t in source.templates(FAILURES) if not listed(t)]
    assert not missing, (
        "list a few words of each of these messages in catalogue/elsewhere.py, with the test that triggers it:\n"
        + lacking(missing)
    )


def test_listed_messages_and_tests_exist(source):
    texts = [t.text for t in source.templates(ERRORS | FAILURES)]
    stale = [fragment for fragment in ELSEWHERE if not any(fragment in text for text in texts)]
    assert not stale, f"no message in the source contains these words of catalogue/elsewhere.py: {stale}"
    tests = {word.rstrip(":;,") for reason in ELSEWHERE.values() for word in reason.split() if word.startswith("test_")}
    gone = [test for test in tests if not (Path(__file__).parent / test).exists()]
    assert not gone, f"catalogue/elsewhere.py names tests that do not exist: {gone}"
