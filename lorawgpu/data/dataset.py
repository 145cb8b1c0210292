"""From a list of data sets to what a run trains on: files found, recognised, tokenised once on all cores, split.

Everything is known before a model is loaded: the counts, the lines that are wrong, and that there is something to
train at all.
"""

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lorawgpu.data import cache
from lorawgpu.data.batching import Sample, Source
from lorawgpu.data.cache import Chunk, Counts, StoreWriter, TokenStore
from lorawgpu.data.chat import ChatTemplate
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.files import BadLine, Raw, find_files, is_plain_lines, parse, read, split_lines
from lorawgpu.data.formats import Place, check_type, recognise
from lorawgpu.data.tokenizer import Tokenizer
from lorawgpu.errors import UserError

CHUNK = 2 << 20  # bytes of input that one worker encodes at a time
WORTH_WORKERS = 16 << 20  # bytes of data from which starting processes pays


@dataclass(frozen=True)
class DatasetSpec:
    """One entry of `datasets`: where, how it is laid out (None: by its keys), how often an epoch sees each sample."""

    path: str
    type: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Loading:
    """How data sets are tokenised. `cache_dir` None: into a temporary folder. `vocab_size` bounds given token ids."""

    settings: EncodeSettings
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    vocab_size: int | None = None
    skip_bad_lines: bool = False
    cache_dir: Path | None = None
    workers: int = os.cpu_count() or 1
    purpose: str = "train"  # what a message says that nothing is left to
    read_only: bool = False  # the cache is read, and tokens that are not there go to a temporary folder


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on. `digest` names the exact tokens: a resume must find the same."""

    train: list[Source]
    weights: list[float]
    validation: Source | None
    stores: list[TokenStore]  # the training data sets whole, before the validation part was taken out
    counts: Counts
    digest: str


def load(
    specs: Sequence[DatasetSpec],
    loading: Loading,
    val_set_size: float,
    seed: int,
    val_specs: Sequence[DatasetSpec] = (),
) -> Data:
    """Tokenise `specs`, and take the validation part from them or, if given, from `val_specs`.

    `val_set_size`: below 1 a fraction of the samples, from 1 on a count, 0 none. UserError for anything wrong with a
    file or a record, for a data set with nothing to train, and when the validation part would take every sample.
    """
    if val_specs and val_set_size:
        raise UserError("give either a validation data set or `val_set_size`, not both")
    stores = [tokenise(spec, loading) for spec in specs]
    val_stores = [tokenise(spec, loading) for spec in val_specs]
    train, validation = split(stores, val_set_size, seed)
    if val_stores:
        validation = Joined(val_stores)
    key = cache.digest([s.folder.name for s in stores + val_stores], [s.weight for s in specs], val_set_size, seed)
    counts = sum((s.counts for s in stores), Counts())
    return Data(train, [s.weight for s in specs], validation, stores, counts, key)


def tokenise(spec: DatasetSpec, loading: Loading) -> TokenStore:
    """All samples of one data set, from the cache when the same bytes were tokenised alike before.

    UserError when a file or a record is wrong (records: unless `skip_bad_lines`), or nothing is left to train.
    """
    declared = None if spec.type is None else check_type(spec.type)
    files = find_files(spec.path)
    kind, first = (declared, None) if declared else _recognise(files, loading.skip_bad_lines)
    encoder = Encoder(kind, loading.settings, loading.tokenizer, loading.template, loading.vocab_size, first)
    key = _key(files, kind, loading)
    folder, keep = _place(key, loading)
    if not folder.is_dir():
        with StoreWriter(folder) as writer:
            _fill(writer, files, encoder, loading)
            writer.finish()
    store = TokenStore(folder, [str(f) for f in files], keep)
    if not len(store):
        c, limit = store.counts, loading.settings.sequence_len
        why = f"samples dropped as longer than sequence_len {limit}"
        if loading.settings.excess_length_strategy == "truncate":
            why = f"samples without a loss in the {limit} tokens that sequence_len {limit} leaves of them"
        raise UserError(
            f"data set {spec.path}: nothing to {loading.purpose}: {c.dropped} {why}, {c.skipped} bad lines skipped, "
            "none left" + "".join(f"\n  {line}" for line in store.skipped[:3])
        )
    return store


def split(stores: Sequence[Source], val_set_size: float, seed: int) -> tuple[list[Source], Source | None]:
    """Take a validation part, drawn by seed from all samples alike: (training sources, validation source or None)."""
    if not val_set_size:
        return list(stores), None
    total = sum(len(s) for s in stores)
    size = int(val_set_size) if val_set_size >= 1 else max(1, round(val_set_size * total))
    if size >= total or val_set_size < 0:
        raise UserError(f"val_set_size {val_set_size} would leave nothing to train: there are {total} samples")
    chosen = np.zeros(total, bool)
    chosen[np.random.Generator(np.random.Philox(seed)).permutation(total)[:size]] = True
    parts = np.split(chosen, np.cumsum([len(s) for s in stores])[:-1])
    train = [Subset(s, np.flatnonzero(~part)) for s, part in zip(stores, parts, strict=True)]
    return train, Joined([Subset(s, np.flatnonzero(part)) for s, part in zip(stores, parts, strict=True)])


class Subset:
    """Some samples of a source."""

    def __init__(self, source: Source, indices: np.ndarray):
        self.source, self.indices = source, indices
        self.lengths = source.lengths[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def place(self, index: int) -> tuple[str, int]:
        return self.source.place(int(self.indices[index]))


class Joined:
    """Several sources one after another."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self.ends = np.cumsum([len(s) for s in sources])
        self.lengths = np.concatenate([s.lengths for s in sources])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        source, own = self._owner(index)
        return source[own]

    def place(self, index: int) -> tuple[str, int]:
        source, own = self._owner(index)
        return source.place(own)

    def _owner(self, index: int) -> tuple[Source, int]:
        owner = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[owner], int(index - (self.ends[owner - 1] if owner else 0))


def _recognise(files: Sequence[Path], skip_bad_lines: bool) -> tuple[str, Place]:
    """The type that the first good record has, and where that is: it holds for all of the data set."""
    for file in files:
        for line, raw in read(file):
            try:
                place = (str(file), line)
                return recognise(parse(*place, raw), place), place
            except BadLine:
                if not skip_bad_lines:
                    raise
    raise UserError(f"data set {files[0]}: it holds no record that can be read")


ENCODING = 4  # raised when the same data come to other ids, labels or counts, so that no cache of before is read


def _key(files: Sequence[Path], kind: str, loading: Loading) -> str:
    template = loading.template
    about_template = template and [template.source, template.special_tokens]
    if template and "strftime_now" in template.source:
        about_template.append(template.now.date().isoformat())  # the render tells the day
    about_tokenizer = loading.tokenizer and loading.tokenizer.digest
    how = [ENCODING, kind, asdict(loading.settings), about_tokenizer, about_template, loading.vocab_size,
           loading.skip_bad_lines]  # fmt: skip
    try:
        return cache.digest([cache.file_digest(f) for f in files], how)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _place(key: str, loading: Loading) -> tuple[Path, object]:
    """The folder of a store, whether it is there yet or not, and what removes it again when it is a temporary one."""
    place = loading.cache_dir and loading.cache_dir / "tokens" / key
    if place and (place.is_dir() or not loading.read_only and _writable(loading.cache_dir)):
        return place, None
    keep = tempfile.TemporaryDirectory(prefix="lorawgpu-tokens-")
    return Path(keep.name) / key, keep


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@dataclass(frozen=True)
class _Task:
    """Work for one process: a byte range of whole lines of a plain file, or records that were read already."""

    file: str
    number: int  # of the file within the data set
    size: int  # bytes of the file it stands for
    start: int = 0
    first_line: int = 1
    records: list[tuple[int, Raw]] | None = None


def _fill(writer: StoreWriter, files: Sequence[Path], encoder: Encoder, loading: Loading) -> None:
    total = sum(f.stat().st_size for f in files)
    many = loading.workers > 1 and total >= WORTH_WORKERS
    tasks = (task for number, file in enumerate(files) for task in _tasks(number, file))
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=None if many else True) as bar:
        for task, chunk in _on_all_cores(tasks, encoder, loading) if many else _here(tasks, encoder, loading):
            writer.append(task.number, chunk)
            bar.update(task.size)


def _tasks(number: int, file: Path) -> Iterator[_Task]:
    if is_plain_lines(file):
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


def _here(tasks: Iterable[_Task], encoder: Encoder, loading: Loading) -> Iterator[tuple[_Task, Chunk]]:
    for task in tasks:
        yield task, _encode(task, encoder, loading.skip_bad_lines)


def _on_all_cores(tasks: Iterable[_Task], encoder: Encoder, loading: Loading) -> Iterator[tuple[_Task, Chunk]]:
    """In order, with few tasks under way: memory does not grow with the file. Processes start fresh (`spawn`), since
    a fork would copy the threads of a GPU driver."""
    with ProcessPoolExecutor(
        loading.workers, get_context("spawn"), _start_worker, (encoder, loading.skip_bad_lines)
    ) as pool:
        waiting: deque = deque()
        for task in tasks:
            waiting.append((task, pool.submit(_work, task)))
            if len(waiting) > 2 * loading.workers:
                done, result = waiting.popleft()
                yield done, result.result()
        for done, result in waiting:
            yield done, result.result()


_worker: tuple[Encoder, bool]  # what a worker process was started with


def _start_worker(encoder: Encoder, skip_bad_lines: bool) -> None:
    global _worker
    _worker = encoder, skip_bad_lines


def _work(task: _Task) -> Chunk:
    return _encode(task, *_worker)


def _encode(task: _Task, encoder: Encoder, skip_bad_lines: bool) -> Chunk:
    samples: list[Sample] = []
    lines: list[int] = []
    skipped: list[str] = []
    tokens = trained = truncated = dropped = endless = shared = 0
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
        trained += encoded.sample.targets
        truncated += encoded.truncated
        endless += encoded.endless
        shared += encoded.shared
    return Chunk(
        np.concatenate([np.empty(0, np.int32), *(s.input_ids for s in samples)]),
        np.concatenate([np.empty(0, np.int32), *(s.labels for s in samples)]),
        np.array([len(s) for s in samples], np.int64),
        np.array(lines, np.int64),
        Counts(len(samples), tokens, trained, truncated, dropped, len(skipped), endless, shared),
        skipped,
    )


def _records(task: _Task) -> Iterable[tuple[int, Raw]]:
    if task.records is not None:
        return task.records
    with open(task.file, "rb") as stream:
        stream.seek(task.start)
        return split_lines(BytesIO(stream.read(task.size)), task.first_line)
