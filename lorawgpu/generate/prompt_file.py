"""The file of `generate --prompts`: lines of text, or records of a data set, of which the prompts are taken."""

import json
from pathlib import Path

from lorawgpu.data.bad_line import bad_line
from lorawgpu.data.formats import to_example
from lorawgpu.data.read_files import SUFFIXES, parse, read
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import decoded

Prompt = str | list[dict]
KEYS = ("messages", "prompt", "text")  # of a record, the first one counts


def read_prompts(path: str) -> dict[int, Prompt]:
    """The prompts of a file by line number: conversations and strings of records, or non-blank lines of text.

    A file has records if its name says so (.jsonl, .json, .csv, .parquet), or if each of its lines is a JSON object.
    UserError if it has no prompt, for a record without one, or for text that is not UTF-8.
    """
    if Path(path).name.lower().removesuffix(".gz").removesuffix(".zst").endswith(SUFFIXES):
        prompts = {line: _prompt(path, line, parse(path, line, raw)) for line, raw in read(Path(path))}
    else:
        lines = _lines(path)
        records = {number: _object(line) for number, line in lines.items()}
        prompts = lines
        if None not in records.values():
            prompts = {number: _prompt(path, number, record) for number, record in records.items()}
    if not prompts:
        raise UserError(f"{path}: holds no prompt; wanted one per line")
    return prompts


def _lines(path: str) -> dict[int, str]:
    try:
        text = decoded(Path(path).read_bytes()).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}: save the file as UTF-8") from None
    return {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}


def _object(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _prompt(path: str, line: int, record: dict) -> Prompt:
    """The prompt of a record: of a conversation, all up to the answers that end it."""
    key = next((key for key in KEYS if record.get(key) is not None), None)
    if key is None:
        have = ", ".join(f"`{k}`" for k in record) or "none"
        raise bad_line(path, line, f"no prompt in the keys {have}; wanted `messages`, `prompt` or `text`")
    value = record[key]
    if isinstance(value, str) and value and key != "messages":
        return value
    if key == "text" or not isinstance(value, list):
        wanted = "a list of messages" if key == "messages" else "a string that is not empty"
        raise bad_line(path, line, f"`{key}` must be {wanted}, got {type(value).__name__}", value)
    messages = to_example("chat", {"messages": value}, (path, line)).messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise bad_line(path, line, f"`{key}` has only answers: nothing to answer")
    return messages
