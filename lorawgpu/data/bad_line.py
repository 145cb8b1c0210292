"""What is wrong with one record: file, line, and the start of the offending text."""

import json

from lorawgpu.errors import UserError

SourceLine = tuple[str, int]  # file, line
EXCERPT = 80  # characters of a bad line that its message quotes


class BadLine(UserError):
    """One record is invalid; `skip_bad_lines` skips it."""


def bad_line(file: str, line: int, what: str, excerpt: object = None) -> BadLine:
    """The error for one record: file, line, what is wrong, and the start of the offending text."""
    tail = "" if excerpt is None else f": {shorten(excerpt)}"
    return BadLine(f"{file}, line {line}: {what}{tail}")


def shorten(value: object) -> str:
    """The first characters of a value, on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[:EXCERPT] + "..."


def decode(file: str, line: int, raw: bytes) -> str:
    """The text of a line. BadLine unless it is UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line)"
        raise bad_line(file, line, what, raw.decode("utf-8", "replace")) from None
