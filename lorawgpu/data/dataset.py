"""From a list of data sets to what a run trains on: files found, recognised, tokenised once on all cores, split.

Everything is known before a model is loaded: the counts, the lines that are wrong, and that there is something to
train at all.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data import token_store as cache
from lorawgpu.data.batching import Sample, SampleSet
from lorawgpu.data.checksum import Damaged
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.find_files import find_files
from lorawgpu.data.formats import Place, check_type, recognise
from lorawgpu.data.read_files import BadLine, parse, read
from lorawgpu.data.token_store import Counts, StoreWriter, TokenStore
from lorawgpu.data.workers import fill
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer

_log = logging.getLogger(__name__)


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
    workers: int = 1
    purpose: str = "train"  # what a message says that nothing is left to
    read_only: bool = False  # the cache is read, and tokens that are not there go to a temporary folder


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on. `digest` names the exact tokens: a resume must find the same."""

    train: list[SampleSet]
    weights: list[float]
    validation: SampleSet | None
    stores: list[TokenStore]  # the training data sets whole, before the validation part was taken out
    counts: Counts
    digest: str
    files: dict[str, str]  # all that were read, each with the digest of its content


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
        validation = Concat(val_stores)
    key = cache.digest([s.folder.name for s in stores + val_stores], [s.weight for s in specs], val_set_size, seed)
    counts = sum((s.counts for s in stores), Counts())
    files = {name: digest for store in stores + val_stores for name, digest in store.files.items()}
    return Data(train, [s.weight for s in specs], validation, stores, counts, key, files)


def tokenise(spec: DatasetSpec, loading: Loading) -> TokenStore:
    """All samples of one data set, from the cache when the same bytes were tokenised alike before.

    UserError when a file or a record is wrong (records: unless `skip_bad_lines`), or nothing is left to train.
    """
    try:
        return _tokenised(spec, loading)
    except BadLine as error:
        if loading.purpose != Loading.purpose:  # only `train` can pass over lines
            raise
        raise BadLine(f"{str(error).rstrip('.')}. --skip-bad-lines passes over such records, and counts them") from None


def _tokenised(spec: DatasetSpec, loading: Loading) -> TokenStore:
    declared = None if spec.type is None else check_type(spec.type)
    files = find_files(spec.path)
    kind, first = (declared, None) if declared else _recognise(files, loading.skip_bad_lines)
    encoder = Encoder(kind, loading.settings, loading.tokenizer, loading.template, loading.vocab_size, first)
    store = _stored(_digests(files), kind, encoder, loading)
    if not len(store):
        c, limit = store.counts, loading.settings.sequence_len
        why = f"samples dropped as longer than sequence_len {limit}"
        cure = ". Raise sequence_len, or set excess_length_strategy to truncate" if c.dropped else ""
        if loading.settings.excess_length_strategy == "truncate":
            why = f"samples without a loss in the {limit} tokens that sequence_len {limit} leaves of them"
            cure = ". Raise sequence_len" if c.dropped else ""
        raise UserError(
            f"data set {spec.path}: nothing to {loading.purpose}: {c.dropped} {why}, {c.skipped} bad lines skipped, "
            f"none left{cure}" + "".join(f"\n  {line}" for line in store.skipped[:3])
        )
    return store


def _stored(files: dict[str, str], kind: str, encoder: Encoder, loading: Loading) -> TokenStore:
    """The store of these files (name: digest) from the cache, or made now: also when the one there is damaged."""
    key = _key(list(files.values()), kind, loading)
    folder, keep = _place(key, loading)
    if folder.is_dir():
        try:
            return TokenStore(folder, files)
        except Damaged as file:
            _log.warning("%s: %s is not what was written: tokenised anew", folder, file)
        if not loading.read_only:
            shutil.rmtree(folder, ignore_errors=True)
        if folder.is_dir():  # it may not be removed
            folder, keep = _temporary(key)
    with StoreWriter(folder) as writer:
        fill(writer, [Path(name) for name in files], encoder, loading.workers, loading.skip_bad_lines)
        writer.finish()
    return TokenStore(folder, files, keep)


def split(stores: Sequence[SampleSet], val_set_size: float, seed: int) -> tuple[list[SampleSet], SampleSet | None]:
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
    return train, Concat([Subset(s, np.flatnonzero(part)) for s, part in zip(stores, parts, strict=True)])


class Subset:
    """Some samples of a source."""

    def __init__(self, source: SampleSet, indices: np.ndarray):
        self.source, self.indices = source, indices
        self.lengths = source.lengths[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.source[int(self.indices[index])]

    def place(self, index: int) -> tuple[str, int]:
        return self.source.place(int(self.indices[index]))


class Concat:
    """Several sources one after another."""

    def __init__(self, sources: Sequence[SampleSet]):
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

    def _owner(self, index: int) -> tuple[SampleSet, int]:
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


def _digests(files: Sequence[Path]) -> dict[str, str]:
    try:
        return {str(file): cache.file_digest(file) for file in files}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _key(digests: Sequence[str], kind: str, loading: Loading) -> str:
    template = loading.template
    about_template = template and [template.source, template.special_tokens]
    if template and "strftime_now" in template.source:
        about_template.append(template.now.date().isoformat())  # the render tells the day
    about_tokenizer = loading.tokenizer and loading.tokenizer.digest
    how = [ENCODING, kind, asdict(loading.settings), about_tokenizer, about_template, loading.vocab_size,
           loading.skip_bad_lines]  # fmt: skip
    return cache.digest(digests, how)


def _place(key: str, loading: Loading) -> tuple[Path, object]:
    """The folder of a store, whether it is there yet or not, and what removes it again when it is a temporary one."""
    place = loading.cache_dir and loading.cache_dir / "tokens" / key
    if place and (place.is_dir() or not loading.read_only and _writable(loading.cache_dir)):
        return place, None
    return _temporary(key)


def _temporary(key: str) -> tuple[Path, object]:
    keep = tempfile.TemporaryDirectory(prefix="lorawgpu-tokens-")
    return Path(keep.name) / key, keep


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
