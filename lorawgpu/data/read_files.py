"""Reading raw records from JSONL, a JSON array, CSV or Parquet, each plain or compressed with gzip or zstandard.

Each record comes with the line it starts on (in Parquet, its row), so that every later error can name it. JSONL lines
are passed on as bytes and parsed by the encoder, on all cores if there are several.
"""

import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lorawgpu.data.bad_line import EXCERPT, BadLine, bad_line, decode, shorten
from lorawgpu.data.compressed import COMPRESSED, open_bytes, read_whole
from lorawgpu.data.read_tables import read_csv, read_parquet
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import UTF16

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
MAX_RECORD = 16 << 20  # bytes of a JSONL line: far beyond any sequence_len
LINES, ARRAY, ONE = "lines", "an array", "one record"  # layouts of a .json file, besides the key of a list
WRAPPERS = ("data", "train", "examples", "records", "rows", "samples", "instances", "items")


Raw = bytes | dict | list | str | int | float | None | BadLine  # bytes: a JSONL line, not yet parsed


def data_suffix(path: Path) -> str:
    """The suffix that names the format, ignoring compression. UserError if it is not one of `SUFFIXES`."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if suffix not in SUFFIXES:
        raise UserError(
            f"data set {path}: unknown file format; wanted a name ending in {', '.join(SUFFIXES)}, "
            f"optionally followed by {' or '.join(COMPRESSED)}"
        )
    return suffix


def is_uncompressed_jsonl(path: Path) -> bool:
    """Whether the file is uncompressed JSONL, so that byte ranges of whole lines can be read independently."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        return _layout(path) == LINES and not _is_utf16(path)
    return suffix in (".jsonl", ".ndjson") and not _is_utf16(path)


def _is_utf16(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) in UTF16


def read(path: Path) -> Iterator[tuple[int, Raw]]:
    """(line, raw record) of a file, in order. A fault that spoils only one record is yielded as a BadLine."""
    kind = data_suffix(path)
    try:
        if kind == ".parquet":
            yield from read_parquet(path)
        elif kind == ".csv":
            with open_bytes(path) as stream:
                yield from read_csv(str(path), stream)
        elif kind == ".json" and (layout := _layout(path)) != LINES:
            with open_bytes(path) as stream:
                yield from _array(str(path), read_whole(path, stream), layout)
        else:
            with open_bytes(path) as stream:
                yield from split_lines(stream, 1)
    except _unreadable() as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def _unreadable() -> tuple[type[Exception], ...]:
    """What the file system and the decompressors raise; zstandard's error only if it has been imported."""
    zstandard = sys.modules.get("zstandard")
    return (OSError, EOFError, zlib.error, *((zstandard.ZstdError,) if zstandard else ()))


def split_lines(stream: BinaryIO, first_line: int) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of every non-blank line, without the BOM and line endings."""
    number = first_line
    while line := stream.readline(MAX_RECORD + 1):
        if len(line) > MAX_RECORD:  # skip the rest of it; `parse` rejects the beginning
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(MAX_RECORD)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > MAX_RECORD or (line := line.strip()):
            yield number, line
        number += 1


def parse(file: str, line: int, raw: Raw) -> dict:
    """The record as a dict. BadLine unless it is UTF-8, JSON and an object."""
    if isinstance(raw, BadLine):
        raise raw
    if isinstance(raw, bytes):
        if len(raw) > MAX_RECORD:
            raise bad_line(file, line, f"longer than {MAX_RECORD >> 20} MiB", raw[:EXCERPT].decode("utf-8", "replace"))
        text = decode(file, line, raw)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad_line(file, line, f"not valid JSON ({_reason(error)})", text) from None
    if not isinstance(raw, dict):
        raise bad_line(file, line, f"wanted a JSON object, got {type(raw).__name__}", raw)
    return raw


def _layout(path: Path) -> str:
    """How a .json file holds its records: LINES, ARRAY, or in one object: the key of its list, or ONE if the object
    itself is the record."""
    with open_bytes(path) as stream:
        if stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            return ARRAY
    with open_bytes(path) as stream:
        line = next((line for _, line in split_lines(stream, 1)), b"")
        whole = _object(line)
        if whole is None and line[:1] == b"{":
            whole = _object(line + b"\n" + read_whole(path, stream))
            if whole is not None and _list_key(whole) is None:
                return ONE
    return LINES if whole is None else _list_key(whole) or LINES


def _object(text: bytes) -> dict | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _list_key(whole: dict) -> str | None:
    """The key of the records in an object that holds all of them."""
    return next((key for key in WRAPPERS if isinstance(whole.get(key), list)), None)


def _array(file: str, data: bytes, layout: str) -> Iterator[tuple[int, Raw]]:
    """The elements of a JSON array, or of an object's list, with the line each starts on. After a syntax error nothing
    can be trusted: it is a UserError for the whole file."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}, line {data[: error.start].count(10) + 1}: not valid UTF-8") from None
    if layout == ONE:
        yield 1, json.loads(text)
        return
    begin = text.index("[") if layout == ARRAY else _list_start(text, layout)
    decoder, blank = json.JSONDecoder(), re.compile(r"\s*")
    at = blank.match(text, begin + 1).end()
    line, counted, more = 1, 0, text[at : at + 1] != "]"
    if not more:
        at = blank.match(text, at + 1).end()
    while more:
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {line}: not valid JSON ({_reason(error)}): {_excerpt(text, at)}") from None
        yield line, value
        at = blank.match(text, at).end()
        more = text[at : at + 1] == ","
        if not more and text[at : at + 1] != "]":
            why = "expected ',' or ']' after this element"
            raise UserError(f"{file}, line {line}: not valid JSON ({why}): {_excerpt(text, counted)}")
        at = blank.match(text, at + 1).end()
    if layout != ARRAY:  # the object goes on after its list
        at = blank.match(text, decoder.raw_decode(text, text.index("{"))[1]).end()
    if at < len(text):
        line += text.count("\n", counted, at)
        what = "array" if layout == ARRAY else "object"
        why = f"more text after the {what}; wanted one {what} in a file, or JSON lines (.jsonl)"
        raise UserError(f"{file}, line {line}: not valid JSON ({why}): {_excerpt(text, at)}")


def _list_start(text: str, key: str) -> int:
    """Where the list of `key` begins in the text of a valid JSON object."""
    decoder, blank = json.JSONDecoder(), re.compile(r"[\s:,]*")
    at = blank.match(text, text.index("{") + 1).end()
    while True:
        name, at = decoder.raw_decode(text, at)
        at = blank.match(text, at).end()
        if name == key:
            return at
        at = blank.match(text, decoder.raw_decode(text, at)[1]).end()


def _excerpt(text: str, at: int) -> str:
    return shorten(text[at : at + 2 * EXCERPT])


def _reason(error: Exception) -> str:
    """What is wrong with the JSON, without the decoder's line number, which is not the file's."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    return str(error)
