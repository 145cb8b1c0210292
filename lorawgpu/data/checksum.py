"""Checksums of a token store, so that a damaged cache is never trained on.

CRC-32 over every byte: it catches disk faults, truncation and stray writes, at gigabytes a second.
"""

import json
import zlib
from pathlib import Path

META = "meta.json"
BLOCK = 16 << 20


class CorruptStore(Exception):
    """A store whose files do not match their checksums; the message is the name of the file."""


class Checksum:
    """Size and CRC-32 of data that arrives in pieces."""

    def __init__(self):
        self.bytes = self.crc32 = 0

    def add(self, data) -> None:
        """`data`: bytes, or a contiguous array."""
        view = memoryview(data).cast("B") if len(data) else b""
        self.bytes += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)

    def as_list(self) -> list[int]:
        return [self.bytes, self.crc32]


def dump_meta(meta: dict, files: dict[str, Checksum]) -> str:
    """The text of `meta.json`: `meta` plus the checksums of `files` and of the metadata itself."""
    full = meta | {"files": {name: checksum.as_list() for name, checksum in files.items()}}
    return json.dumps(full | {"sum": _meta_crc(full)}, ensure_ascii=False, indent=1)


def load_meta(folder: Path) -> dict:
    """The metadata of a store. Raises CorruptStore if any of its files is missing or does not match its checksum."""
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
        intact = meta.pop("sum") == _meta_crc(meta)
        files = meta.pop("files").items() if intact else ()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise CorruptStore(META)
    for name, expected in files:
        if _file_checksum(folder / name, expected[0]) != expected:
            raise CorruptStore(name)
    return meta


def _meta_crc(meta: dict) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _file_checksum(path: Path, size: int) -> list[int] | None:
    """None if the file is missing or its size differs from `size`, which is known without reading it."""
    checksum = Checksum()
    try:
        if path.stat().st_size != size:
            return None
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                checksum.add(block)
    except OSError:
        return None
    return checksum.as_list()
