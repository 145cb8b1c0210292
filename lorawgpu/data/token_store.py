"""Tokenised samples in flat files: written once, memory-mapped afterwards, keyed by everything that made them.

A store is a folder: `ids.i32` and `labels.i32` (all samples one after another), `ends.i64` (where each ends),
`lines.i64` [samples, 2] (file number, line), `meta.json` (counts, skipped lines, sums of all). It is written beside
its place and renamed, so a reader sees a whole one or none; what became of it since, the sums tell.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import Sample
from lorawgpu.data.checksum import META, Sum, seal, unseal

LAYOUT = 1  # raise it when ids, labels or the files change for the same input
LISTED = 100  # skipped lines kept word by word; all are counted


@dataclass(frozen=True)
class Counts:
    """What became of the records of a data set."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0  # those that carry loss: never the first of a sample
    truncated: int = 0
    dropped: int = 0  # too long, or cut before its first trained token
    skipped: int = 0  # bad lines passed over
    endless: int = 0  # chats whose last trained turn has no end mark
    empty: int = 0  # samples with a trained turn, or piece of text, that is blank
    shared: int = 0  # tokens of trained and untrained text alike: they are trained

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Chunk:
    """A run of encoded records, as one worker hands it on: few arrays, which cost little to send."""

    ids: np.ndarray  # int32, all samples one after another; `labels` alike
    labels: np.ndarray
    lengths: np.ndarray  # int64 [samples], `lines` alike
    lines: np.ndarray
    counts: Counts
    skipped: list[str]


class TokenStore:
    """Samples of one data set, in file order, mapped from `folder`. A `SampleSet` for batches.

    `files`: the names of its files where they lie now, each with the digest of its content; the store itself is keyed
    by content alone. Damaged when it is not what was written.
    """

    def __init__(self, folder: Path, files: dict[str, str], keep: object = None):
        self.folder, self.files, self._names = folder, files, list(files)
        self._keep = keep  # a temporary folder lives as long as this does
        meta = unseal(folder)
        self.counts = Counts(**meta["counts"])
        self.skipped: list[str] = meta["skipped"]
        self._ids, self._labels = _map(folder / "ids.i32", np.int32), _map(folder / "labels.i32", np.int32)
        self._ends = _map(folder / "ends.i64", np.int64)
        self._lines = _map(folder / "lines.i64", np.int64).reshape(-1, 2)
        self.lengths = np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        end = int(self._ends[index])
        span = slice(end - int(self.lengths[index]), end)
        return Sample(self._ids[span], self._labels[span])

    def place(self, index: int) -> tuple[str, int]:
        """The file and the line that sample `index` was read from."""
        file, line = self._lines[index]
        return self._names[file], int(line)


class StoreWriter:
    """Collects chunks in a folder beside `folder` and moves it there when finished. A context manager."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
        self._streams = {n: (self.work / n).open("wb") for n in ("ids.i32", "labels.i32", "ends.i64", "lines.i64")}
        self._sums = {name: Sum() for name in self._streams}
        self._tokens, self._counts, self._skipped = 0, Counts(), []

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_) -> None:
        for stream in self._streams.values():
            stream.close()
        shutil.rmtree(self.work, ignore_errors=True)  # gone already when finished

    def append(self, file: int, chunk: Chunk) -> None:
        """Add a run of records of file number `file`."""
        places = np.stack([np.full_like(chunk.lines, file), chunk.lines], axis=1)
        ends = self._tokens + np.cumsum(chunk.lengths)
        for name, array in (("ids", chunk.ids), ("labels", chunk.labels), ("ends", ends), ("lines", places)):
            file = f"{name}.i{8 * array.itemsize}"
            self._streams[file].write(array)
            self._sums[file].add(array)
        self._tokens += len(chunk.ids)
        self._counts += chunk.counts
        self._skipped += chunk.skipped[: LISTED - len(self._skipped)]

    def finish(self) -> None:
        """Write the rest and put the folder in its place; a store that another process put there first stays."""
        meta = {"counts": self._counts.as_dict(), "skipped": self._skipped}
        (self.work / META).write_text(seal(meta, self._sums), "utf-8")
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        try:
            self.work.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise


def default_cache_dir() -> Path:
    """`LORAWGPU_CACHE`, else a folder of ours in the user's cache."""
    own = os.environ.get("LORAWGPU_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorawgpu"


def digest(*parts: object) -> str:
    """A key over values that JSON can hold."""
    text = json.dumps([LAYOUT, *parts], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def file_digest(path: Path) -> str:
    """A key over the bytes of a file, about a second a gigabyte."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _map(path: Path, dtype: type) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
