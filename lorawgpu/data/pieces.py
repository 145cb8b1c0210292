"""What is read of a data set before its records are encoded: how many they are, if it is a part of them; their type."""

from collections.abc import Sequence
from pathlib import Path

from lorawgpu import guard
from lorawgpu.data.bad_line import BadLine, SourceLine
from lorawgpu.data.formats import detect_type
from lorawgpu.data.read_files import parse, read
from lorawgpu.data.slices import Shard, Slice, chosen, take
from lorawgpu.data.splits import Files
from lorawgpu.data.workers import Piece, allow_array
from lorawgpu.errors import UserError
from lorawgpu.guard.status import begin


def pieces_of(files: Files, path: str, split: str | None, shard: Shard | None) -> Sequence[Piece]:
    """The records of a data set, file by file: all, or those of `files.parts` and `shard`. UserError if there are none,
    or if a file cannot be read. `path`, `split`: for messages."""
    if shard is None and all(part.is_whole for part, _ in files.parts):
        of_parts = [file for _, names in files.parts for file in names]
        return [(file, None) for file in of_parts or files.used]
    counts = {file: _counted(file) for file in files.used}
    found = take(files.parts or [(Slice("train"), files.used)], counts, shard)
    if not found:
        what = [f"split {split}"] if split else []
        what += [f"shards_idx {shard.index} of {shard.count} shards"] if shard else []
        there = f"the files have {sum(counts.values())}: take a larger part"
        raise UserError(f"data set {path}: no records in {', '.join(what)}; {there}")
    return found


def _counted(file: Path) -> int:
    try:
        return guard.call(_count, file)
    except guard.WorkerStopped as stopped:
        raise UserError(f"{file}: after line {stopped.line}: {stopped}") from None


def _count(file: Path) -> int:
    """In a worker: the records of a file, good and bad."""
    allow_array(file)
    count = 0
    for line, _ in read(file):
        begin(line)
        count += 1
    return count


def detected(pieces: Sequence[Piece], skip_bad_lines: bool) -> tuple[str, SourceLine]:
    """The type of the first good record, which holds for the whole data set, and where that record is. UserError if
    there is none."""
    try:
        return guard.call(_detect_type, pieces, skip_bad_lines)
    except guard.WorkerStopped as stopped:
        raise UserError(f"data set {pieces[0][0]}, after line {stopped.line}: {stopped}") from None


def _detect_type(pieces: Sequence[Piece], skip_bad_lines: bool) -> tuple[str, SourceLine]:
    for file, numbers in pieces:
        allow_array(file)
        for line, raw in chosen(read(file), numbers):
            begin(line)
            try:
                source = (str(file), line)
                return detect_type(parse(*source, raw), source), source
            except BadLine:
                if not skip_bad_lines:
                    raise
    raise UserError(f"data set {pieces[0][0]}: contains no readable records")
