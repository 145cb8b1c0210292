"""tests/messages.py: which messages a source holds, and which of them a printed text shows."""

from messages import SourceTree, shown_by

SOURCE = """
class Bad(UserError):
    pass

def bad(line, what) -> Bad:
    return Bad(f"line {line}: {what}")

def why(size):
    if size:
        return f"holds {size} bytes too many"
    return "holds nothing"

def check(path, size):
    if size:
        raise UserError(f"{path}: {why(size)}")
    if path:
        raise bad(3, "no digits") from None
    what = "a word" if size else f"the number {size}"
    raise bad(4, what)

def wrap(error):
    raise UserError(f"the model {name}: {error}")

def lost(e):
    raise DeviceError("the device is lost")
"""


def source(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return SourceTree(tmp_path)


def test_messages_are_found_whoever_raises_them(tmp_path):
    """In subclasses and functions that make errors; through names and functions where the call says little."""
    found = {t.text for t in source(tmp_path, a=SOURCE).templates({"UserError"})}
    assert found == {
        "line {line}: {what}",
        "{path}: holds {size} bytes too many",
        "{path}: holds nothing",
        "no digits",
        "a word",
        "the number {size}",
        "the model {name}: {error}",
    }


def test_a_message_that_moves_is_the_same(tmp_path):
    before = source(tmp_path, a=SOURCE).templates({"UserError"})
    moved = SOURCE.replace("def check", "def examine").replace("def wrap", "def enclose")
    (tmp_path / "a.py").write_text("")
    after = source(tmp_path, b=moved).templates({"UserError"})
    assert [(t.text, t.pieces) for t in after] == [(t.text, t.pieces) for t in before]


def test_a_text_shows_its_own_messages_and_no_shorter_relative(tmp_path):
    templates = source(
        tmp_path,
        a=SOURCE + 'raise UserError(f"{path}: {key} is missing")\nraise UserError(f"{path}: key a.{key} is missing")',
    ).templates({"UserError"})

    def shown(printed):
        return {t.text for t in shown_by(printed, templates)}

    assert shown("error: f.gguf: key a.b is missing") == {"{path}: key a.{key} is missing"}
    assert shown("error: f.npz: labels is missing") == {"{path}: {key} is missing"}
    assert shown("error: the model m: m: holds nothing") == {"the model {name}: {error}", "{path}: holds nothing"}
    assert shown("error: line 3: no digits") == {"line {line}: {what}", "no digits"}
    assert shown("error: quite another") == set()
