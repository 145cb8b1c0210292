"""Tokenized samples in flat files: written once, then memory-mapped, keyed by everything that determines them.

A store is a folder: `ids.i32` and `labels.i32` (all samples concatenated), `ends.i64` (where each one ends),
`lines.i64` [samples, 2] (file number, line), `meta.json` (counts, skipped lines, checksums). It is written under a
temporary name and renamed, so a reader never sees half of one; the checksums catch later damage.
"""

import hashlib
import json
import os
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.data.checksum import META, Checksum, dump_meta, load_meta
from lorawgpu.files.atomic import find_marked, marked
from lorawgpu.files.lock import is_held, locked

STORES = "tokens-2"  # the folder of all stores in the cache: renamed when the layout of a store changes
DIGEST_VERSION = 1
HELD = "held"  # the lock file of a store that is being written
OLD = 3600  # seconds after which one without a lock file is no longer about to get it, or to be renamed
MAX_SKIPPED = 100  # messages of skipped lines that are kept; all are counted


@dataclass(frozen=True)
class Counts:
    """What became of the records of a data set."""

    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0  # target tokens: never the first of a sample
    truncated: int = 0
    dropped: int = 0  # too long, or no target token left after truncation
    skipped: int = 0  # bad lines
    missing_eos: int = 0  # chats whose last trained turn has no end-of-turn token
    empty_targets: int = 0  # samples with a trained turn or piece of text that is blank
    boundary_tokens: int = 0  # trained tokens that span trained and untrained text
    hidden_tools: int = 0  # samples with tools or tool calls that the chat template does not show
    hidden_reasoning: int = 0  # or with reasoning
    hidden_messages: int = 0  # or with whole messages
    other_prompt: int = 0  # samples whose last answer does not follow the generation prompt

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def hidden(self) -> dict[str, int]:
        """What the chat template does not show, in words, with the samples that have it."""
        words = {"tools": self.hidden_tools, "reasoning": self.hidden_reasoning, "messages": self.hidden_messages}
        return {kind: count for kind, count in words.items() if count}

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Chunk:
    """Consecutive encoded records from one worker, as a few arrays, which are cheap to send between processes."""

    ids: np.ndarray  # int32, all samples concatenated
    labels: np.ndarray  # like ids
    lengths: np.ndarray  # int64 [samples]
    lines: np.ndarray  # int64 [samples]
    counts: Counts
    skipped: list[str]


class TokenStore:
    """Samples of one data set, in file order, memory-mapped from `folder`. A `SampleSet` for batches.

    `files`: the current path of each file with the digest of its content; the store itself is keyed
    by content alone. Raises CorruptStore if the files do not match their checksums.
    """

    kind = ""  # the type of its records, if the reader says it
    is_part = False  # of its files, some records were not asked for

    def __init__(self, folder: Path, files: dict[str, str], keep: object = None):
        self.folder, self.files, self._names = folder, files, list(files)
        self._keep = keep  # keeps a temporary folder alive
        meta = load_meta(folder)
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

    @cached_property
    def targets(self) -> np.ndarray:
        """Target tokens of each sample, int64. The first token of a sample is never one."""
        starts = self._ends - self.lengths
        is_target = self._labels != IGNORE
        is_target[starts] = False
        return np.add.reduceat(is_target, starts, dtype=np.int64) if len(starts) else starts

    def lines_of(self, name: str) -> np.ndarray:
        """The lines of a file that its samples come from, int64 [samples]."""
        return self._lines[self._lines[:, 0] == self._names.index(name), 1]

    def place(self, index: int) -> tuple[str, int]:
        """The file and line that sample `index` was read from."""
        file, line = self._lines[index]
        return self._names[file], int(line)


class StoreWriter:
    """Collects chunks in a temporary sibling of `folder` and renames it when finished. A context manager.

    It holds a lock in there, by which those that a killed process left are told apart; these are removed.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep_abandoned(folder.parent)
        self.work = marked(folder.with_name(folder.name[:16]), "partial")
        self.work.mkdir()
        self._held = ExitStack()
        self._held.enter_context(locked(self.work / HELD, f"{self.work}: is in use"))
        self._streams = {n: (self.work / n).open("wb") for n in ("ids.i32", "labels.i32", "ends.i64", "lines.i64")}
        self._checksums = {name: Checksum() for name in self._streams}
        self._tokens, self._counts, self._skipped = 0, Counts(), []

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, _, error, __) -> None:
        for stream in self._streams.values():
            with suppress(OSError):  # a full disk fails again here
                stream.close()
        self._held.close()
        shutil.rmtree(self.work, ignore_errors=True)  # already renamed if finished
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
            raise OSError(error.errno, error.strerror, str(self.folder.parent)) from None

    def append(self, file: int, chunk: Chunk) -> None:
        """Add records of file number `file`."""
        source_lines = np.stack([np.full_like(chunk.lines, file), chunk.lines], axis=1)
        ends = self._tokens + np.cumsum(chunk.lengths)
        for name, array in (("ids", chunk.ids), ("labels", chunk.labels), ("ends", ends), ("lines", source_lines)):
            file = f"{name}.i{8 * array.itemsize}"
            self._streams[file].write(array)
            self._checksums[file].add(array)
        self._tokens += len(chunk.ids)
        self._counts += chunk.counts
        self._skipped += chunk.skipped[: MAX_SKIPPED - len(self._skipped)]

    def finish(self) -> None:
        """Write the metadata and rename the folder; if another process got there first, its store stays."""
        meta = {"counts": self._counts.as_dict(), "skipped": self._skipped}
        (self.work / META).write_text(dump_meta(meta, self._checksums), "utf-8")
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
        self._held.close()  # its file goes; a folder without one is swept only when it is old
        try:
            self.work.rename(self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise


def sweep_abandoned(stores: Path) -> None:
    """Remove what killed processes have begun to write in a folder of stores."""
    for _, path in find_marked(stores, "partial"):
        with suppress(OSError):  # another process may be removing it too
            lock = path / HELD
            old = time.time() - path.stat().st_mtime > OLD
            if not is_held(lock) if lock.exists() else old:
                shutil.rmtree(path, ignore_errors=True)


def digest(*parts: object) -> str:
    """A hash of JSON values. A checkpoint records it for its data: a change here makes old ones refuse to resume."""
    text = json.dumps([DIGEST_VERSION, *parts], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def file_digest(path: Path) -> str:
    """A hash of a file's bytes, at about a gigabyte per second."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


def _map(path: Path, dtype: type) -> np.ndarray:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
