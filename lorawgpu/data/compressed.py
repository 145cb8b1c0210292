"""The bytes of data files, gzipped and zstandard-compressed ones decompressed on the way, and only so far."""

import gzip
import io
from pathlib import Path
from typing import BinaryIO

from lorawgpu.errors import UserError

COMPRESSED = (".gz", ".zst")
# How far a compressed file may expand beyond its first 8 MiB: text shrinks to a tenth, with a prompt that every record
# repeats to a hundredth, a bomb to a thousandth and less. Less where all of it is in memory at once.
MAX_EXPANSION, MAX_WHOLE = 200, 32


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed on the way."""
    if path.suffix.lower() == ".gz":
        return _bounded(path, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading .zst needs the extra `zstd`: pip install 'lorawgpu[zstd]'") from None
        decompressor = zstandard.ZstdDecompressor()
        return _bounded(path, decompressor.stream_reader(path.open("rb"), read_across_frames=True, closefd=True))
    return path.open("rb")


def limit(path: Path, expansion: int) -> int:
    return (8 << 20) + expansion * path.stat().st_size


def bomb(path: Path, expansion: int) -> UserError:
    return UserError(f"{path}: expands more than {expansion}-fold; if you trust it, store it uncompressed")


def read_whole(path: Path, stream: BinaryIO) -> bytes:
    """All of a stream; UserError when it is a compressed file that becomes too much at once."""
    if path.suffix.lower() not in COMPRESSED:
        return stream.read()
    data = stream.read(limit(path, MAX_WHOLE) + 1)
    if len(data) > limit(path, MAX_WHOLE):
        raise bomb(path, MAX_WHOLE)
    return data


def _bounded(path: Path, stream: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_Bounded(path, stream), 1 << 18)


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends in a UserError when it is far longer than its file."""

    def __init__(self, path: Path, stream: BinaryIO):
        self.path, self.stream, self.left = path, stream, limit(path, MAX_EXPANSION)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self.stream.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise bomb(self.path, MAX_EXPANSION)
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()
