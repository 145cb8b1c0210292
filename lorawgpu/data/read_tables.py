"""Reading CSV and Parquet: rows as records, with cells of JSON lists parsed."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from lorawgpu.data.arrow_columns import plain_column
from lorawgpu.data.bad_line import BadLine, bad_line, decode, shorten
from lorawgpu.data.compressed import COMPRESSED, MAX_EXPANSION, bomb, limit, open_bytes, read_whole
from lorawgpu.data.field_names import CONVERSATIONS
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import MAX_POINTER, refuse_pointer

PARQUET_ROWS = 2  # decoded at a time: a few bytes of Parquet can declare rows as long as the whole file

Row = tuple[int, dict | BadLine]


def read_csv(file: str, stream: BinaryIO) -> Iterator[Row]:
    """Rows as dicts, with the line each starts on; a cell with a JSON list (messages, ids) becomes that list."""
    csv.field_size_limit(2**31 - 1)  # the default rejects cells over 128 KiB; this is a C long's maximum on Windows
    reader = csv.reader((decode(file, n, raw) for n, raw in _strip_bom(stream)), strict=True)
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


def read_parquet(path: Path) -> Iterator[Row]:
    """Rows as dicts, with their numbers from 1. UserError, naming the file, if it cannot be read."""
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
