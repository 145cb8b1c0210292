"""Reading raw records from JSONL, a JSON array, CSV or Parquet, each plain or compressed with gzip or zstandard.

Each record comes with the line it starts on (in Parquet, its row), so that every later error can name it. JSONL lines
are passed on as bytes and parsed by the encoder, on all cores if there are several.
"""

import csv
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lorawgpu.data.arrow_columns import plain_column
from lorawgpu.data.compressed import COMPRESSED, MAX_EXPANSION, bomb, limit, open_bytes, read_whole
from lorawgpu.data.field_names import CONVERSATIONS
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import MAX_POINTER, UTF16, refuse_pointer

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
EXCERPT = 80  # characters of a bad line that its message quotes
MAX_RECORD = 16 << 20  # bytes of a JSONL line: far beyond any sequence_len
LINES, ARRAY, ONE = "lines", "an array", "one record"  # layouts of a .json file, besides the key of a list
WRAPPERS = ("data", "train", "examples", "records", "rows", "samples", "instances", "items")
PARQUET_ROWS = 2  # decoded at a time: a few bytes of Parquet can declare rows as long as the whole file


class BadLine(UserError):
    """One record is invalid; `skip_bad_lines` skips it."""


Raw = bytes | dict | list | str | int | float | None | BadLine  # bytes: a JSONL line, not yet parsed


def bad_line(file: str, line: int, what: str, excerpt: object = None) -> BadLine:
    """The error for one record: file, line, what is wrong, and the start of the offending text."""
    tail = "" if excerpt is None else f": {shorten(excerpt)}"
    return BadLine(f"{file}, line {line}: {what}{tail}")


def shorten(value: object) -> str:
    """The first characters of a value, on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text[: 4 * EXCERPT].split())
    return text if len(text) <= EXCERPT else text[:EXCERPT] + "..."


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
            yield from _parquet(path)
        elif kind == ".csv":
            with open_bytes(path) as stream:
                yield from _csv(str(path), stream)
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
        text = _decode(file, line, raw)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad_line(file, line, f"not valid JSON ({_reason(error)})", text) from None
    if not isinstance(raw, dict):
        raise bad_line(file, line, f"wanted a JSON object, got {type(raw).__name__}", raw)
    return raw


def _decode(file: str, line: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"not valid UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line)"
        raise bad_line(file, line, what, raw.decode("utf-8", "replace")) from None


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


def _csv(file: str, stream: BinaryIO) -> Iterator[tuple[int, Raw]]:
    """Rows as dicts, with the line each starts on; a cell with a JSON list (messages, ids) becomes that list."""
    csv.field_size_limit(2**31 - 1)  # the default rejects cells over 128 KiB; this is a C long's maximum on Windows
    reader = csv.reader((_decode(file, n, raw) for n, raw in _strip_bom(stream)), strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{file}, line {start}: not valid CSV ({error})") from None
        if row is None:
            return
        if row and header is None:
            header = _header(f"{file}, line {start}", row)
        elif row and len(row) != len(header):
            yield start, bad_line(file, start, f"{len(row)} cells, but the header has {len(header)}", ",".join(row))
        elif row:
            yield start, _cells(dict(zip(header, row, strict=True)))
        start = reader.line_num + 1


def _header(where: str, row: list[str]) -> list[str]:
    seen = set()
    if twice := next((name for name in row if name and (name in seen or seen.add(name))), None):
        raise UserError(f"{where}: two columns are named {shorten(twice)!r}; rename or drop one")
    if len(row) == 1 and (separator := next((m for m in ";\t|" if m in row[0]), None)):
        raise UserError(f"{where}: columns are separated by {separator!r} ({shorten(row[0])!r}); save it with commas")
    return row


def _strip_bom(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, 1):
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _parquet(path: Path) -> Iterator[tuple[int, Raw]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    if path.stat().st_size <= MAX_POINTER:
        refuse_pointer(path)
    source = path
    if path.suffix.lower() in COMPRESSED:
        with open_bytes(path) as stream:
            source = io.BytesIO(read_whole(path, stream))
    try:
        row, left = 0, limit(path, MAX_EXPANSION)
        for batch in parquet.ParquetFile(source).iter_batches(batch_size=PARQUET_ROWS):
            left -= batch.nbytes
            if left < 0:
                raise bomb(path, MAX_EXPANSION)
            columns = [plain_column(column) for column in batch.columns]
            for index in range(batch.num_rows):
                row += 1
                try:
                    values = [column[index].as_py() for column in columns]
                except UnicodeDecodeError as error:
                    yield row, bad_line(str(path), row, f"a cell is not valid UTF-8 ({error.reason})")
                else:
                    record = dict(zip(batch.schema.names, values, strict=True))
                    yield row, _cells(_without_nulls(record))
    except (ArrowException, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None


def _without_nulls(value: object) -> object:
    """Arrow gives every struct of a column the same keys, and fills up with nulls."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


_LISTS = {"messages", "conversations", "segments", "input_ids", "labels", "tools", *CONVERSATIONS}  # as JSON in a cell


def _cells(record: dict) -> dict:
    """A table row without its null cells, and with cells of JSON lists parsed."""
    out = {}
    for key, value in record.items():
        if value is None:
            continue
        if isinstance(value, str) and key in _LISTS:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
                pass  # stays a string: the format will say what it wanted instead
        out[key] = value
    return out
