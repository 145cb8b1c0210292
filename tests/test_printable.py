"""Text of files in a terminal."""

import sys

import pytest

from lorawgpu.cli import main_of
from lorawgpu.errors import UserError
from lorawgpu.util.printable import MAX_MESSAGE, message, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \U0001f642\tx\n", "plain \u00e9 \U0001f642\tx\n"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("over\rwritten\x7f\x00", "over\\x0dwritten\\x7f\\x00"),
        ("\x9b2J \u202egnp.exe \u2066", "\\x9b2J \\u202egnp.exe \\u2066"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_control_characters_are_spelled(text, shown):
    assert printable(text) == shown


def test_long_messages_keep_their_beginning_and_end():
    text = message("m.safetensors: " + "x" * 10**6 + "; download it again")
    assert len(text) <= MAX_MESSAGE and text.startswith("m.safetensors: xxx") and text.endswith("x; download it again")
    assert "(1,000,034 characters)" in text
    assert message("y" * MAX_MESSAGE) == "y" * MAX_MESSAGE


def test_errors_and_notes_of_commands_are_printable(capsys):
    def run(argv):
        print("note: \x1b]0;title\x07", file=sys.stderr)
        raise UserError("\x1b[2J" + "a" * 5000 + "\ud800")

    assert main_of(run)([]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\\x1b]0;title\\x07" in err and "\\x1b[2Ja" in err and len(err) < 1100
