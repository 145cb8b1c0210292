"""Reading and tokenizing data files into a store: in pieces of a few megabytes, by guarded worker processes."""

import os
import pickle
import queue
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lorawgpu import guard
from lorawgpu.chat.hidden import KINDS
from lorawgpu.data.bad_line import BadLine, SourceLine, bad_line
from lorawgpu.data.batching import Sample
from lorawgpu.data.compressed import COMPRESSED
from lorawgpu.data.encode import Encoded, Encoder
from lorawgpu.data.read_files import Raw, data_suffix, is_uncompressed_jsonl, read, split_lines
from lorawgpu.data.slices import chosen
from lorawgpu.data.token_store import Chunk, Counts, StoreWriter
from lorawgpu.errors import UserError
from lorawgpu.guard.status import begin
from lorawgpu.util.progress import progress

CHUNK = 2 << 20  # bytes of input per task
WHOLE = 256 << 10  # bytes of a compressed file, or a table, below which one task holds it
MIN_PARALLEL = 16 << 20  # bytes of data below which starting processes does not pay
MEMORY = 750 << 20  # bytes for all workers together, unless the user says how many there are
WORKER, PER_TOKEN = 45 << 20, 640  # bytes: Python and its libraries; the tokenizer, per vocabulary entry
ARRAY_MEMORY = 4  # times its size that a JSON array takes when it is read
MAX_STOPPED = 10  # records of a data set that may meet a limit, before the data set is given up


def default_workers(vocabulary: int) -> int:
    """Workers for a tokenizer of this size: one per core, as far as `MEMORY` allows."""
    return max(1, min(os.cpu_count() or 1, MEMORY // (WORKER + PER_TOKEN * vocabulary)))


def start_worker() -> None:
    """Start the worker of this process now, so that it is there when a text comes; other work can go on meanwhile."""
    guard.shared_worker().start(__name__)


Piece = tuple[Path, np.ndarray | None]  # a file, and the numbers of its records, ascending; None for all


@dataclass(frozen=True)
class _Task:
    """Work for one process: a byte range of whole lines of an uncompressed file, records already read, or all of a
    file (`size` 0)."""

    file: str
    number: int  # index of the file within the data set
    done: int  # bytes of the file, for the progress
    start: int = 0
    size: int = 0
    first_line: int = 1
    records: bytes | None = None  # pickled: only workers look inside
    numbers: np.ndarray | None = None  # of the records of a whole file that are wanted, ascending; None for all
    stopped: dict[int, str] = field(default_factory=dict)  # lines that met a limit, and which


def encode_files(
    writer: StoreWriter, pieces: Sequence[Piece], encoder: Encoder, workers: int, skip_bad_lines: bool
) -> None:
    """Encode the records of `pieces` in order, with a progress display if it takes a while.

    UserError for a bad file, a bad record or one that meets a limit (unless `skip_bad_lines`).
    """
    total = sum(file.stat().st_size for file, _ in pieces)
    order = {file: number for number, file in enumerate(dict.fromkeys(file for file, _ in pieces))}
    with progress(total, "tokenizing", "B") as advance, closing(_Pool(workers if total >= MIN_PARALLEL else 1)) as pool:
        tasks = (task for file, numbers in pieces for task in _tasks(order[file], file, numbers))
        for task, chunk in pool.map(guard.Kept(_itself, encoder), tasks, skip_bad_lines):
            writer.append(task.number, chunk)
            advance(task.done)


def encode_record(encoder: Encoder, source: SourceLine, record: dict) -> Sample:
    """One record that no file holds. UserError, with its source, if it is bad or meets a limit."""
    try:
        return guard.call(_sample, encoder, source, record)
    except guard.WorkerStopped as stopped:
        raise BadLine(f"{source[0]}, line {source[1]}: {stopped}") from None


def _sample(encoder: Encoder, source: SourceLine, record: dict) -> Sample:
    return encoder(*source, record).sample


def _itself(encoder: Encoder) -> Encoder:
    return encoder


def _tasks(number: int, file: Path, numbers: np.ndarray | None) -> Iterator[_Task]:
    left = file.stat().st_size
    if numbers is None and is_uncompressed_jsonl(file):
        yield from _ranges(number, file)
    elif left <= (WHOLE if file.suffix.lower() in (*COMPRESSED, ".parquet") else CHUNK):
        yield _Task(str(file), number, left, numbers=numbers)
    else:
        with closing(guard.Worker()) as reader:
            try:
                for size, records in reader.stream(_batches, file, numbers):
                    yield _Task(str(file), number, min(size, left), records=records)
                    left -= min(size, left)
            except guard.WorkerStopped as stopped:
                raise UserError(f"{file}: after line {stopped.line}: {stopped}") from None


def _ranges(number: int, file: Path) -> Iterator[_Task]:
    """Ranges of whole lines. No line is held in memory here, however long it is."""
    start = end = 0
    line = following = 1
    with file.open("rb") as stream:
        while data := stream.read(CHUNK):
            following += data.count(b"\n")
            if cut := data.rfind(b"\n") + 1:
                size = end + cut - start
                yield _Task(str(file), number, size, start, size, line)
                start, line = end + cut, following
            end += len(data)
    if end > start:
        yield _Task(str(file), number, end - start, start, end - start, line)


def allow_array(file: Path) -> None:
    """In a worker: memory for a JSON array, which is held there whole."""
    more = ARRAY_MEMORY * file.stat().st_size if data_suffix(file) == ".json" else 0
    guard.allow_work(more)


def _batches(file: Path, numbers: np.ndarray | None) -> Iterator[tuple[int, bytes]]:
    """In a worker: the records of a file, pickled, in batches; and about how many bytes each batch has."""
    allow_array(file)
    records, size = [], 0
    for line, raw in chosen(read(file), numbers):
        begin(line)
        records.append((line, raw))
        size += len(raw) if isinstance(raw, bytes) else len(repr(raw))
        if size >= CHUNK:
            yield size, pickle.dumps(records)
            records, size = [], 0
    yield size, pickle.dumps(records)


class _Pool:
    """`count` workers, the one of this process among them."""

    def __init__(self, count: int):
        self.workers = [guard.shared_worker(), *(guard.Worker() for _ in range(count - 1))]
        self.idle: queue.SimpleQueue[guard.Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(count)
        self.stops = 0

    def map(self, encoder: guard.Kept, tasks: Iterable[_Task], skip_bad_lines: bool) -> Iterator[tuple[_Task, Chunk]]:
        """In order, with a bounded number of tasks in flight, so that memory does not grow with the file."""
        waiting: deque[tuple[_Task, Future]] = deque()
        for task in tasks:
            waiting.append((task, self.threads.submit(self._encode, encoder, task, skip_bad_lines)))
            if len(waiting) > 2 * len(self.workers):
                done, result = waiting.popleft()
                yield done, result.result()
        for done, result in waiting:
            yield done, result.result()

    def _encode(self, encoder: guard.Kept, task: _Task, skip_bad_lines: bool) -> Chunk:
        worker = self.idle.get()
        try:
            while True:
                try:
                    return worker.call(_encode, task, encoder, skip_bad_lines)
                except guard.WorkerStopped as stopped:
                    task = self._without(task, stopped, skip_bad_lines)
        finally:
            self.idle.put(worker)

    def _without(self, task: _Task, stopped: guard.WorkerStopped, skip_bad_lines: bool) -> _Task:
        """The task without the line that met a limit. BadLine unless it may be skipped."""
        if not stopped.line or stopped.line in task.stopped:
            raise UserError(f"{task.file}: {stopped}")
        self.stops += 1
        message = f"{task.file}, line {stopped.line}: {stopped}"
        if not skip_bad_lines:
            raise BadLine(message)
        if self.stops > MAX_STOPPED:
            raise UserError(f"{message}; more than {MAX_STOPPED} records of this data set did")
        return replace(task, stopped={**task.stopped, stopped.line: message})

    def close(self) -> None:
        """End all workers but the one of this process, which ends only if it is busy."""
        for worker in self.workers if self.idle.qsize() < len(self.workers) else self.workers[1:]:
            worker.close()
        self.threads.shutdown(cancel_futures=True)


def _encode(task: _Task, encoder: Encoder, skip_bad_lines: bool) -> Chunk:
    samples: list[Sample] = []
    lines: list[int] = []
    skipped: list[str] = []
    tokens = targets = truncated = dropped = missing_eos = empty_targets = boundary_tokens = other_prompt = 0
    hidden = Counter()
    for line, raw in _records(task):
        begin(line)
        try:
            if line in task.stopped:
                raise BadLine(task.stopped[line])
            encoded = _encoded(encoder, task.file, line, raw)
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


def _encoded(encoder: Encoder, file: str, line: int, raw: Raw) -> Encoded:
    try:
        return encoder(file, line, raw)
    except RecursionError:
        raise bad_line(file, line, "its values are nested too deeply") from None


def _records(task: _Task) -> Iterator[tuple[int, Raw]]:
    if task.records is not None:
        yield from pickle.loads(task.records)
    elif not task.size:
        yield from chosen(read(Path(task.file)), task.numbers)
    else:
        with open(task.file, "rb") as stream:
            stream.seek(task.start)
            yield from split_lines(_Part(stream, task.size), task.first_line)


class _Part:
    """The next `left` bytes of a file, by lines."""

    def __init__(self, stream: BinaryIO, left: int):
        self.stream, self.left = stream, left

    def readline(self, limit: int) -> bytes:
        line = self.stream.readline(min(limit, self.left))
        self.left -= len(line)
        return line
