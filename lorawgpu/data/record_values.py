"""The values of a record: each has the type that its format wants, or the record is bad."""

from lorawgpu.data.bad_line import SourceLine, bad_line
from lorawgpu.files.untrusted import brief


def flag_of(message: dict, source: SourceLine, where: str) -> bool | None:
    """The value of `train`, or of OpenAI's `weight`; None if there is neither."""
    flag = message.get("train", message.get("weight"))
    if flag not in (None, True, False):
        raise bad_line(*source, f"{where}: `train` must be true or false (`weight` 0 or 1), got {brief(flag)}")
    return None if flag is None else bool(flag)


def content_of(message: dict, source: SourceLine, where: str) -> str | None:
    """The text of a message, its parts joined: most templates would print a list of parts as a Python list."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content in (None, []) and message.get("tool_calls"):
        return None
    if not isinstance(content, list):
        got = "nothing" if content is None else type(content).__name__
        raise bad_line(*source, f"{where}: `content` must be a string, got {got}", message)
    if not content:
        raise bad_line(*source, f"{where}: `content` is an empty list")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text":
            raise bad_line(*source, f"{where}: only parts of type text are supported, got {brief(kind)}", part)
        if not isinstance(part.get("text"), str):
            raise bad_line(*source, f"{where}: a part of type text needs a string in `text`", part)
    return "".join(part["text"] for part in content)


def list_of(value: object, source: SourceLine, key: str) -> list:
    if not isinstance(value, list):
        raise bad_line(*source, f"`{key}` must be a list, got {type(value).__name__}", value)
    return value


def string_of(value: object, source: SourceLine, key: str) -> str:
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise bad_line(*source, f"`{key}` must be a string, got {got}", None if value is None else value)
    return value


def integers_of(value: object, source: SourceLine, key: str, least: int) -> list[int]:
    for number, item in enumerate(list_of(value, source, key)):
        if type(item) is not int or not least <= item < 2**31:
            raise bad_line(*source, f"`{key}[{number}]` must be an integer of at least {least}, got {brief(item)}")
    return value
