"""Reading data files as bytes, decompressing gzip and zstandard up to a limit."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import MAX_POINTER, UTF16, decoded, refuse_pointer

COMPRESSED = (".gz", ".zst")
# How far a compressed file may expand beyond its first 8 MiB. Text compresses about 10:1, or 100:1 if every record
# repeats the same prompt; a decompression bomb 1000:1 and more. Files that are held in memory whole get less.
MAX_EXPANSION, MAX_WHOLE = 200, 32


COMPRESSED_BLOCK = 4 << 10  # bytes; a block of the worst bomb becomes a hundred megabytes


def open_bytes(path: Path) -> BinaryIO:
    """The (decompressed) bytes of a file, UTF-16 as UTF-8. UserError if zstandard is needed and not installed, and for
    a Git LFS pointer."""
    if path.stat().st_size <= MAX_POINTER:
        refuse_pointer(path)
    stream = _decompressed(path)
    if stream.peek(2)[:2] not in UTF16:
        return stream
    with stream:
        data = read_whole(path, stream)
    try:
        return io.BytesIO(decoded(data).encode())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-16 at byte {error.start + 1}: save the file as UTF-8") from None


def _decompressed(path: Path) -> io.BufferedReader:
    if path.suffix.lower() == ".gz":
        return _bounded(path, gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading .zst files needs zstandard: pip install zstandard") from None
        return _bounded(path, _Zstandard(path.open("rb"), zstandard.ZstdDecompressor().decompressobj))
    return path.open("rb")


def limit(path: Path, expansion: int) -> int:
    """The most bytes that the file may decompress to."""
    return (8 << 20) + expansion * path.stat().st_size


def bomb(path: Path, expansion: int) -> UserError:
    return UserError(f"{path}: expands more than {expansion}-fold; if you trust this file, decompress it first")


def read_whole(path: Path, stream: BinaryIO) -> bytes:
    """The whole stream. UserError if it is compressed and expands too far to be held in memory."""
    if path.suffix.lower() not in COMPRESSED:
        return stream.read()
    data = stream.read(limit(path, MAX_WHOLE) + 1)
    if len(data) > limit(path, MAX_WHOLE):
        raise bomb(path, MAX_WHOLE)
    return data


def _bounded(path: Path, stream: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_Bounded(path, stream), 1 << 18)


class _Zstandard(io.RawIOBase):
    """The frames of a file, one after another. EOFError if the last one is cut off, which the library's own reader does
    not tell."""

    def __init__(self, stream: BinaryIO, start: Callable):
        self.stream, self.start, self.frame = stream, start, None
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready and (data := self.stream.read(COMPRESSED_BLOCK)):
            pieces = []
            while data:
                self.frame = self.frame or self.start()
                pieces.append(self.frame.decompress(data))
                data = self.frame.unused_data
                if self.frame.eof:
                    self.frame = None
            self.ready = memoryview(b"".join(pieces))
        if not self.ready and self.frame:
            raise EOFError("it ends in the middle of its compressed data: it was cut off; download or copy it again")
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()


class _Bounded(io.RawIOBase):
    """A decompressing stream that raises UserError once it has expanded too far."""

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
