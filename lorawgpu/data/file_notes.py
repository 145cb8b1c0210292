"""What a user may not expect of the files that a run reads: some are left out, some are read twice."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lorawgpu.data.batching import SampleSet
from lorawgpu.data.splits import Files
from lorawgpu.data.token_store import TokenStore
from lorawgpu.files.paths import expand

SHOWN = 3  # names; folders of shards have thousands


def left_out(found: Iterable[tuple[str, Files]], read: Iterable[str]) -> list[str]:
    """Files of a data set's other splits, by its `path`, that are not read at all."""
    read, notes = set(read), []
    for path, files in found:
        left = [f for f in (*files.unread, *files.held_out) if str(f) not in read]
        if left:
            names = sorted(_inside(f, expand(path)) for f in left)
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            notes.append(f"{path}: {', '.join(names[:SHOWN])}{more} not read; to use a file, set `split` or `path`")
    return list(dict.fromkeys(notes))


def _inside(file: Path, folder: Path) -> str:
    return (file.relative_to(folder) if file.is_relative_to(folder) else file).as_posix()


def read_twice(trained: Sequence[TokenStore], held_out: Sequence[TokenStore]) -> list[str]:
    """Files, known by their content, that are both trained and evaluated on, or that two data sets train on."""
    seen: dict[str, list[tuple[TokenStore, str]]] = {}
    notes = []

    def earlier(digest: str, read: tuple[TokenStore, str]) -> str | None:
        return next((other[1] for other in seen.get(digest, []) if _share_records(other, read)), None)

    for store, name, digest in _files(trained):
        if first := earlier(digest, (store, name)):
            notes.append(f"{_both(first, name)} trained on twice an epoch; `weight: 2` says the same")
        seen.setdefault(digest, []).append((store, name))
    for store, name, digest in _files(held_out):
        if first := earlier(digest, (store, name)):
            notes.append(f"{_both(first, name)} trained on and held out: that loss says nothing about new data")
    return notes


def copies(train: Sequence[SampleSet], held_out: SampleSet | None) -> list[str]:
    """Held-out samples of the same tokens as a training sample, which doubled lines and overlapping files have.

    Training samples of another length than all held-out ones are not looked at.
    """
    if held_out is None:
        return []
    wanted = [held_out[i].input_ids.tobytes() for i in range(len(held_out))]
    left = set(wanted)
    for source in train:
        for index in np.flatnonzero(np.isin(source.lengths, held_out.lengths)):
            left.discard(source[int(index)].input_ids.tobytes())
    found = sum(ids not in left for ids in wanted)
    many = f"{found:,} of the {len(wanted):,} held-out samples are trained on too, word for word"
    return [f"{many}: that loss says little about new data"] if found else []


def _files(stores: Sequence[TokenStore]) -> Iterator[tuple[TokenStore, str, str]]:
    return ((store, name, digest) for store in stores for name, digest in store.files.items())


def _share_records(*read: tuple[TokenStore, str]) -> bool:
    """Whether two readings of the same content have samples of the same lines. Of a part of a file that has many
    records on a line, it cannot be told."""
    if not any(store.is_part for store, _ in read):
        return True
    lines = [store.lines_of(name) for store, name in read]
    many = any(store.is_part and len(np.unique(rows)) < len(rows) for (store, _), rows in zip(read, lines, strict=True))
    return not many and np.intersect1d(*lines).size > 0


def _both(name: str, other: str) -> str:
    return f"{name} is" if name == other else f"{name} and {other} have the same content, which is"
