"""Which files of a data set are trained on, which are held out, and which are not read: by the names of splits.

mlx-lm's folders hold `train.jsonl`, `valid.jsonl` and `test.jsonl`; data sets of the Hugging Face hub have the split as
a word in the path (`data/train-00000-of-00001.parquet`, `train/a.jsonl`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lorawgpu.errors import UserError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
NAMES = {TRAIN: ("train", "training"), VALIDATION: ("valid", "validation", "val", "dev"), TEST: ("test", "testing")}
_WORD = {s: re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", re.IGNORECASE) for s, names in NAMES.items()}


@dataclass(frozen=True)
class Files:
    """`used`: what the data set is asked for. `held_out`: its validation files, if they are to be evaluated on.
    `unread`: those of other splits."""

    used: list[Path]
    held_out: tuple[Path, ...] = ()
    unread: tuple[Path, ...] = ()


def split_of(path: PurePath) -> str | None:
    """The split that a path names: in its file name, else in the nearest of its folders."""
    for part in reversed(path.parts):
        if found := next((split for split, word in _WORD.items() if word.search(part)), None):
            return found
    return None


def is_whole_name(path: PurePath) -> bool:
    """Whether the file name is a split and nothing else, such as `valid.jsonl` or `test.json.gz`."""
    return any(path.name.split(".")[0].lower() in names for names in NAMES.values())


def training_files(files: Iterable[Path], folder: Path) -> Files:
    """The files of a folder to train on: its training split, or if it has none, all that are not wholly named after
    another split. UserError if none is left."""
    files, splits = list(files), {}
    for file in files:
        splits.setdefault(split_of(file.relative_to(folder)), []).append(file)
    others = [f for f in splits.get(VALIDATION, []) + splits.get(TEST, []) if is_whole_name(f)]
    used = splits.get(TRAIN) or [f for f in files if f not in others]
    if not used:
        names = ", ".join(sorted(f.name for f in files))
        raise UserError(f"data set {folder}: it has no file to train on, only {names}: name one as `path`")
    held_out = [f for f in others if split_of(f.relative_to(folder)) == VALIDATION]
    return Files(used, tuple(held_out), tuple(f for f in files if f not in used and f not in held_out))


def evaluation_files(files: Iterable[Path], folder: Path) -> Files:
    """The files of a folder to evaluate on: its validation split, else its test split, else all."""
    files = list(files)
    of = {file: split_of(file.relative_to(folder)) for file in files}
    wanted = next((split for split in (VALIDATION, TEST) if split in of.values()), None)
    used = [f for f in files if of[f] == wanted] if wanted else files
    return Files(used, (), tuple(f for f in files if f not in used))
