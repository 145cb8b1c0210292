"""Reading untrusted files: bounded JSON, and memory-mapped pieces of large files."""

import json
import mmap
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.kinds import why_no_file

LFS_POINTER, MAX_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # how one begins, and its bytes at most
UTF16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
MAX_JSON = 16 << 20  # bytes; a config has a few thousand, the index of a large model a few million


def decoded(raw: bytes) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a BOM, as PowerShell's `>` writes it; without the BOM.

    UnicodeDecodeError if it is neither.
    """
    return raw.decode("utf-16" if raw[:2] in UTF16 else "utf-8-sig")


def parse_json(text: bytes, source: str) -> object:
    """Strict UTF-8 JSON. UserError for bad syntax, a duplicate key, or nesting that is too deep."""
    try:
        return json.loads(decoded(text), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise UserError(f"{source}: JSON is nested too deeply.") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both ValueErrors
        raise UserError(f"{source}: not valid JSON: {error}.") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {brief(twice)} appears twice")
    return result


def brief(value: object) -> str:
    """`repr`, shortened to fit a message: a hostile name can be megabytes long."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_json_object(path: Path, limit: int = MAX_JSON) -> dict:
    """The JSON object in a file of at most `limit` bytes. UserError if there is none."""
    data = parse_json(read_bytes(path, limit), str(path))
    if not isinstance(data, dict):
        raise UserError(f"{path}: wanted a JSON object, got {type(data).__name__}.")
    return data


def read_bytes(path: Path, limit: int) -> bytes:
    """The contents of a file of at most `limit` bytes. UserError if it is larger or cannot be read."""
    size = file_size(path)
    if size > limit:
        raise UserError(f"{path}: {size} bytes; at most {limit} are allowed.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None


def read_text_if_regular(path: Path, limit: int) -> str:
    """The first `limit` bytes of a text file, with U+FFFD for what is no UTF-8; "" if there is no regular file.

    For files that are shown and not relied on. A FIFO or a device is never opened: it may block, or never end.
    """
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except (OSError, ValueError):  # ValueError: a path with NUL
        return ""


def file_size(path: Path) -> int:
    """The size of a regular file in bytes. UserError for anything else."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: {why_no_file(path)}.")
        size = path.stat().st_size
        if size <= MAX_POINTER:
            refuse_pointer(path)
        return size
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None


def refuse_pointer(path: Path) -> None:
    """UserError for the few lines that Git leaves in the place of a large file that it has not fetched."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(
                f"{path}: this is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder, or "
                "download the file from the hub"
            )


def map_bytes(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """Bytes `offset .. offset + nbytes` of a file as a read-only uint8 array. UserError if they cannot be mapped.

    Each array has its own mapping, so its pages are freed with it: reading a model tensor by tensor takes the memory
    of one tensor.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), offset - start + nbytes, access=mmap.ACCESS_READ, offset=start)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: bytes {offset} to {offset + nbytes} cannot be mapped: {error}.") from None
    return np.frombuffer(mapped, np.uint8, nbytes, offset - start)
