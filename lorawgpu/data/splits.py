"""Which files of a data set are trained on, which are held out, and which are not read: by the names of splits.

mlx-lm's folders hold `train.jsonl`, `valid.jsonl` and `test.jsonl`; data sets of the Hugging Face hub have the split as
a word in the path (`data/train-00000-of-00001.parquet`, `train/a.jsonl`).
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lorawgpu.data.slices import Slice
from lorawgpu.errors import UserError

SHOWN = 5  # names of files in a message
TRAIN, VALIDATION, TEST = "train", "validation", "test"
NAMES = {TRAIN: ("train", "training"), VALIDATION: ("valid", "validation", "val", "dev"), TEST: ("test", "testing")}
_WORD = {s: re.compile(rf"(?<![a-z])({'|'.join(names)})(?![a-z])", re.IGNORECASE) for s, names in NAMES.items()}


@dataclass(frozen=True)
class Files:
    """`used`: what the data set is asked for. `held_out`: its validation files, if they are to be evaluated on.
    `unread`: those of other splits. `parts`: the slices of splits that are asked for, each with the files of its split.
    """

    used: list[Path]
    held_out: tuple[Path, ...] = ()
    unread: tuple[Path, ...] = ()
    parts: tuple[tuple[Slice, tuple[Path, ...]], ...] = ()


def split_of(path: PurePath) -> str | None:
    """The split that a path names: in its file name, else in the nearest of its folders."""
    for part in reversed(path.parts):
        if found := next((split for split, word in _WORD.items() if word.search(part)), None):
            return found
    return None


def is_whole_name(path: PurePath) -> bool:
    """Whether the file name is a split and nothing else, such as `valid.jsonl` or `test.json.gz`."""
    return _canonical(path.name.split(".")[0]) is not None


def _canonical(name: str) -> str | None:
    return next((split for split, names in NAMES.items() if name.lower() in names), None)


def same_split(name: str, other: str) -> bool:
    """Whether two names are of one split, as `dev` and `validation` are."""
    return name == other or _canonical(name) is not None and _canonical(name) == _canonical(other)


def _labels(path: PurePath) -> set[str]:
    """What a path may call its split: the file name without its shard (`train_sft-00000-of-00002`), and its folders."""
    stem = path.name.split(".")[0]
    return {stem, re.sub(r"[-_]?\d+([-_]of[-_]\d+)?$", "", stem), *path.parts[:-1]}


def files_of_split(files: Iterable[Path], folder: Path, split: str) -> Files:
    """The files of a folder whose split has this name, or another spelling of it (`valid`). UserError if none has."""
    files = list(files)
    inside = {file: file.relative_to(folder) for file in files}
    named = _canonical(split)
    used = [f for f in files if split in _labels(inside[f])]
    used = used or [f for f in files if named and split_of(inside[f]) == named]
    if not used:
        known = ", ".join(sorted({found for f in files if (found := split_of(inside[f]))})) or "none"
        names = ", ".join(sorted(str(inside[f]) for f in files)[:SHOWN])
        raise UserError(f"data set {folder}: no file is of the split `{split}`; it has {known} ({names})")
    return Files(used)


def listed_files(files: Iterable[Path], path: str, split: str) -> Files:
    """The files of a split among those that a file name or a pattern stands for: as in `datasets`, they are the split
    `train` unless they are named after others. UserError if none is of that split."""
    files = list(files)
    try:
        return files_of_split(files, Path(os.path.commonpath([file.parent for file in files])), split)
    except UserError:
        if _canonical(split) == TRAIN:
            return Files(files)
        what = "a file or pattern whose names say no split is the split `train`; remove `split`, or give the folder"
        raise UserError(f"data set {path}: no file is of the split `{split}`: {what}") from None


def _is_certain(path: PurePath) -> bool:
    """Whether a whole part of the path is the name of a split: not `unit-test.jsonl`, which may be about tests."""
    return any(map(_canonical, _labels(path)))


def training_files(files: Iterable[Path], folder: Path) -> Files:
    """The files of a folder to train on: its training split, or if it has none, all that are not wholly named after
    another split. UserError if none is left."""
    files, splits = list(files), {}
    for file in files:
        splits.setdefault(split_of(file.relative_to(folder)), []).append(file)
    others = [f for split in (VALIDATION, TEST) for f in splits.get(split, []) if _is_certain(f.relative_to(folder))]
    used = splits.get(TRAIN) or [f for f in files if f not in others]
    if not used:
        names = ", ".join(sorted(f.name for f in files))
        raise UserError(f"data set {folder}: it has no file to train on, only {names}: name one as `path`")
    held_out = [f for f in others if split_of(f.relative_to(folder)) == VALIDATION and is_whole_name(f)]
    return Files(used, tuple(held_out), tuple(f for f in files if f not in used and f not in held_out))


def evaluation_files(files: Iterable[Path], folder: Path) -> Files:
    """The files of a folder to evaluate on: its validation split, else its test split, else all."""
    files = list(files)
    of = {file: split_of(file.relative_to(folder)) for file in files}
    wanted = next((split for split in (VALIDATION, TEST) if split in of.values()), None)
    used = [f for f in files if of[f] == wanted] if wanted else files
    return Files(used, (), tuple(f for f in files if f not in used))
