"""What the files of a token store were when it was written, so that a damaged one is not trained on.

CRC-32 of all bytes: it finds what a disk, a cut or a stray write does, at gigabytes a second.
"""

import json
import zlib
from pathlib import Path

META = "meta.json"
BLOCK = 16 << 20


class CorruptStore(Exception):
    """A store that is not what was written."""


class Checksum:
    """Size and CRC-32 of bytes that come piece by piece."""

    def __init__(self):
        self.bytes = self.crc32 = 0

    def add(self, data) -> None:
        """`data`: bytes, or an array that lies in one piece."""
        view = memoryview(data).cast("B") if len(data) else b""
        self.bytes += len(view)
        self.crc32 = zlib.crc32(view, self.crc32)

    def as_list(self) -> list[int]:
        return [self.bytes, self.crc32]


def dump_meta(meta: dict, files: dict[str, Checksum]) -> str:
    """The text of `meta.json`: what `meta` says, with the sums of the files and of itself."""
    whole = meta | {"files": {name: total.as_list() for name, total in files.items()}}
    return json.dumps(whole | {"sum": _meta_crc(whole)}, ensure_ascii=False, indent=1)


def load_meta(folder: Path) -> dict:
    """What `meta.json` says. CorruptStore, saying which file, when one of the store is missing or another than it was."""
    try:
        meta = json.loads((folder / META).read_text("utf-8"))
        whole = meta.pop("sum") == _meta_crc(meta)
        files = meta.pop("files").items() if whole else ()
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CorruptStore(META)
    for name, expected in files:
        if _file_checksum(folder / name, expected[0]) != expected:
            raise CorruptStore(name)
    return meta


def _meta_crc(meta: dict) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _file_checksum(path: Path, size: int) -> list[int] | None:
    """None where the file is missing or has another size, which is known without reading it."""
    total = Checksum()
    try:
        if path.stat().st_size != size:
            return None
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                total.add(block)
    except OSError:
        return None
    return total.as_list()
