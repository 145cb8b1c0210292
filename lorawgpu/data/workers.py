"""Tokenizing data files into a store: in pieces of a few megabytes, by a pool of processes."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from lorawgpu.chat.hidden import KINDS
from lorawgpu.data.batching import Sample
from lorawgpu.data.encode import Encoder
from lorawgpu.data.read_files import BadLine, Raw, is_uncompressed_jsonl, read, split_lines
from lorawgpu.data.token_store import Chunk, Counts, StoreWriter
from lorawgpu.errors import UserError
from lorawgpu.util.progress import progress

CHUNK = 2 << 20  # bytes of input per task
MIN_PARALLEL = 16 << 20  # bytes of data below which starting processes does not pay
MEMORY = 750 << 20  # bytes for all workers together, unless the user says how many there are
WORKER, PER_TOKEN = 45 << 20, 640  # bytes: Python and its libraries; the tokenizer, per vocabulary entry


def default_workers(vocabulary: int) -> int:
    """Workers for a tokenizer of this size: one per core, as far as `MEMORY` allows."""
    return max(1, min(os.cpu_count() or 1, MEMORY // (WORKER + PER_TOKEN * vocabulary)))


@dataclass(frozen=True)
class _Task:
    """Work for one process: a byte range of whole lines of an uncompressed file, or records already read."""

    file: str
    number: int  # index of the file within the data set
    size: int  # bytes of the file, for the progress
    start: int = 0
    first_line: int = 1
    records: list[tuple[int, Raw]] | None = None


def encode_files(
    writer: StoreWriter, files: Sequence[Path], encoder: Encoder, workers: int, skip_bad_lines: bool
) -> None:
    """Encode all records of `files` in order, with a progress display if it takes a while.

    UserError for a bad file, a bad record (unless `skip_bad_lines`), or a worker process that was killed.
    """
    total = sum(f.stat().st_size for f in files)
    tasks = (task for number, file in enumerate(files) for task in _tasks(number, file))
    with progress(total, "tokenizing", "B") as advance:
        if workers > 1 and total >= MIN_PARALLEL:
            chunks = _on_all_cores(tasks, encoder, workers, skip_bad_lines)
        else:
            chunks = _in_this_process(tasks, encoder, skip_bad_lines)
        for task, chunk in chunks:
            writer.append(task.number, chunk)
            advance(task.size)


def _tasks(number: int, file: Path) -> Iterator[_Task]:
    if is_uncompressed_jsonl(file):
        yield from _ranges(number, file)
        return
    records, size = [], 0
    for line, raw in read(file):
        records.append((line, raw))
        size += len(raw) if isinstance(raw, bytes) else len(repr(raw))
        if size >= CHUNK:
            yield _Task(str(file), number, size, records=records)
            records, size = [], 0
    yield _Task(str(file), number, size, records=records)


def _ranges(number: int, file: Path) -> Iterator[_Task]:
    line = 1
    with file.open("rb") as stream:
        while data := stream.read(CHUNK):
            rest = b"" if data.endswith(b"\n") else stream.readline()
            size = len(data) + len(rest)
            yield _Task(str(file), number, size, stream.tell() - size, line)
            line += data.count(b"\n") + rest.count(b"\n")


def _in_this_process(tasks: Iterable[_Task], encoder: Encoder, skip_bad_lines: bool) -> Iterator[tuple[_Task, Chunk]]:
    for task in tasks:
        yield task, _encode(task, encoder, skip_bad_lines)


def _on_all_cores(
    tasks: Iterable[_Task], encoder: Encoder, workers: int, skip_bad_lines: bool
) -> Iterator[tuple[_Task, Chunk]]:
    """In order, with a bounded number of tasks in flight, so that memory does not grow with the file. Processes are
    spawned: a fork would copy the threads of a GPU driver."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder, skip_bad_lines)) as pool:
        waiting: deque = deque()
        try:
            for task in tasks:
                waiting.append((task, pool.submit(_work, task)))
                if len(waiting) > 2 * workers:
                    done, result = waiting.popleft()
                    yield done, result.result()
            for done, result in waiting:
                yield done, result.result()
        except BrokenProcessPool:
            raise UserError(
                f"one of {workers} tokenizing processes was killed, most likely because memory ran out; "
                "lower dataset_num_proc (1 starts no processes)"
            ) from None


_worker: tuple[Encoder, bool]  # of this worker process


def _start_worker(encoder: Encoder, skip_bad_lines: bool) -> None:
    global _worker
    _worker = encoder, skip_bad_lines


def _work(task: _Task) -> Chunk:
    return _encode(task, *_worker)


def _encode(task: _Task, encoder: Encoder, skip_bad_lines: bool) -> Chunk:
    samples: list[Sample] = []
    lines: list[int] = []
    skipped: list[str] = []
    tokens = targets = truncated = dropped = missing_eos = empty_targets = boundary_tokens = other_prompt = 0
    hidden = Counter()
    for line, raw in _records(task):
        try:
            encoded = encoder(task.file, line, raw)
        except BadLine as error:
            if not skip_bad_lines:
                raise
            skipped.append(str(error))
            continue
        if encoded.sample is None:
            dropped += 1
            continue
        samples.append(encoded.sample)
        lines.append(line)
        tokens += len(encoded.sample)
        targets += encoded.sample.targets
        truncated += encoded.truncated
        missing_eos += encoded.missing_eos
        empty_targets += encoded.empty_targets
        boundary_tokens += encoded.boundary_tokens
        hidden.update(encoded.hidden)
        other_prompt += encoded.other_prompt
    return Chunk(
        np.concatenate([np.empty(0, np.int32), *(s.input_ids for s in samples)]),
        np.concatenate([np.empty(0, np.int32), *(s.labels for s in samples)]),
        np.array([len(s) for s in samples], np.int64),
        np.array(lines, np.int64),
        Counts(
            len(samples),
            tokens,
            targets,
            truncated,
            dropped,
            len(skipped),
            missing_eos,
            empty_targets,
            boundary_tokens,
            *(hidden[kind] for kind in KINDS),
            other_prompt,
        ),
        skipped,
    )


def _records(task: _Task) -> Iterable[tuple[int, Raw]]:
    if task.records is not None:
        return task.records
    with open(task.file, "rb") as stream:
        stream.seek(task.start)
        return split_lines(BytesIO(stream.read(task.size)), task.first_line)
