"""What a user may not expect of the files that a run reads: some are left out, some are read twice."""

from collections.abc import Iterable, Sequence
from pathlib import Path

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
    first: dict[str, str] = {}
    notes = []
    for name, digest in (item for store in trained for item in store.files.items()):
        if digest in first:
            notes.append(f"{_both(first[digest], name)} trained on twice an epoch; `weight: 2` says the same")
        first.setdefault(digest, name)
    for name, digest in (item for store in held_out for item in store.files.items()):
        if digest in first:
            notes.append(f"{_both(first[digest], name)} trained on and held out: that loss says nothing about new data")
    return notes


def _both(name: str, other: str) -> str:
    return f"{name} is" if name == other else f"{name} and {other} have the same content, which is"
