"""Text of strangers in a terminal: control characters, which can move the cursor or change what was shown, spelled."""

MAX_MESSAGE = 1000  # characters of an error message
_TAIL = 200  # of a longer one, that are kept at its end, where the advice is

_CODES = {*range(32), 127, *range(128, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SPELLED = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CODES - {ord("\t"), ord("\n")}}
_IN_PROGRESS = {code: text for code, text in _SPELLED.items() if code != ord("\r")}


def printable(text: str, progress: bool = False) -> str:
    """The text with control characters, direction marks and half surrogates spelled as in Python, but tabs and ends of
    lines; `progress`: and returns to the start of the line."""
    return text.translate(_IN_PROGRESS if progress else _SPELLED).encode("utf-8", "backslashreplace").decode("utf-8")


def message(text: str) -> str:
    """A printable message, cut if it is long."""
    text = printable(text)
    if len(text) <= MAX_MESSAGE:
        return text
    left_out = f" ... ({len(text):,} characters) ... "
    return text[: MAX_MESSAGE - _TAIL - len(left_out)] + left_out + text[-_TAIL:]
