"""From a list of data sets to what a run trains on: find the files, detect the format, tokenize once, split.

All of it happens before the model is loaded, so bad lines and empty data are reported early.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lorawgpu.chat.template import GuardedTemplate
from lorawgpu.data import token_store as cache
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.batching import Sample, SampleSet
from lorawgpu.data.checksum import CorruptStore
from lorawgpu.data.configurations import Within
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.field_names import described
from lorawgpu.data.file_notes import copies, left_out, read_twice
from lorawgpu.data.find_files import WHOLE, files_to_evaluate, files_to_train
from lorawgpu.data.formats import check_type
from lorawgpu.data.pieces import detected, pieces_of
from lorawgpu.data.renaming import Renaming
from lorawgpu.data.slices import Shard
from lorawgpu.data.splits import Files
from lorawgpu.data.token_store import Counts, StoreWriter, TokenStore
from lorawgpu.data.workers import Piece, encode_files
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.guarded import GuardedTokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetSpec:
    """One entry of `datasets`. `type`: the format, None to detect it; `weight`: how often an epoch sees each sample;
    `split`: of a folder or hub data set, or slices of splits; `shard`: of that."""

    path: str
    type: str | None = None
    weight: float = 1.0
    split: str | None = None
    renaming: Renaming | None = None  # for records with other keys
    roles_to_train: tuple[str, ...] | None = None  # instead of those of `LoadSettings`
    train_on_eos: str = EncodeSettings.train_on_eos
    shard: Shard | None = None
    within: Within = WHOLE  # the files that are meant, of a folder or hub data set


@dataclass(frozen=True)
class LoadSettings:
    """How data sets are tokenized. `cache_dir` None: a temporary folder; `vocab_size`: bound of pre-tokenized ids."""

    settings: EncodeSettings
    tokenizer: GuardedTokenizer | None
    template: GuardedTemplate | None
    vocab_size: int | None = None
    skip_bad_lines: bool = False
    cache_dir: Path | None = None
    workers: int = 1
    purpose: str = "train"  # for messages: "nothing to train"
    read_only: bool = False  # read the cache, but write new tokens to a temporary folder


@dataclass(frozen=True)
class Data:
    """What a run trains on and is evaluated on. `digest` identifies the exact tokens: a resume needs the same ones."""

    train: list[SampleSet]
    weights: list[float]
    validation: SampleSet | None
    stores: list[TokenStore]  # the training data sets before the held-out split
    counts: Counts  # of the training data, without what is held out
    digest: str
    files: dict[str, str]  # every file read, with the digest of its content
    notes: list[str]  # what a user may not expect of the choice of files


def load(
    specs: Sequence[DatasetSpec],
    loading: LoadSettings,
    val_set_size: float,
    seed: int,
    val_specs: Sequence[DatasetSpec] = (),
) -> Data:
    """Tokenize `specs`; hold out `val_set_size` of their samples, or use `val_specs` as validation data. With neither,
    the validation files in a folder of `specs` are held out.

    `val_set_size`: a fraction below 1, a count from 1 on, 0 for none. UserError for a bad file or record, a data set
    with nothing to train on, or a validation split that would take every sample.
    """
    if val_specs and val_set_size:
        raise UserError("give either a validation data set or `val_set_size`, not both")
    training = loading.purpose == LoadSettings.purpose
    found = [(files_to_train if training else files_to_evaluate)(spec.path, spec.split, spec.within) for spec in specs]
    held_out = [(spec, files_to_evaluate(spec.path, spec.split, spec.within)) for spec in val_specs]
    if not val_specs and not val_set_size:
        held_out = [
            (replace(s, shard=None), Files(list(f.held_out))) for s, f in zip(specs, found, strict=True) if f.held_out
        ]
    stores = [tokenize(spec, loading, f) for spec, f in zip(specs, found, strict=True)]
    val_stores = [tokenize(spec, loading, f) for spec, f in held_out]
    train, validation = split(stores, val_set_size, seed)
    if val_stores:
        validation = Concat(val_stores)
    key = cache.digest([s.folder.name for s in stores + val_stores], [s.weight for s in specs], val_set_size, seed)
    counts = sum((s.counts for s in stores), Counts())
    if not val_stores and validation is not None:
        targets = sum(part.source.targets[part.indices].sum() for part in validation.sources)
        counts += Counts(-len(validation), -int(validation.lengths.sum()), -int(targets))
    files = {name: digest for store in stores + val_stores for name, digest in store.files.items()}
    asked = [(spec.path, f) for spec, f in [*zip(specs, found, strict=True), *held_out]]
    read_as = [f"{s.path}: {text}" for s, st in zip(specs, stores, strict=True) if (text := described(st.kind))]
    notes = read_as + left_out(asked, files) + (read_twice(stores, val_stores) or copies(train, validation))
    return Data(train, [s.weight for s in specs], validation, stores, counts, key, files, notes)


def tokenize(spec: DatasetSpec, loading: LoadSettings, files: Files | None = None) -> TokenStore:
    """All samples of one data set, from the cache if the same bytes were tokenized with the same settings before.

    `files`: those of the data set to read; by default those to train on. UserError for a bad file, a bad record (unless
    `skip_bad_lines`), or if no sample is left.
    """
    try:
        return _tokenize(spec, loading, files_to_train(spec.path, spec.split, spec.within) if files is None else files)
    except BadLine as error:
        if loading.purpose != LoadSettings.purpose:  # only `train` has the option
            raise
        raise BadLine(f"{str(error).rstrip('.')}. --skip-bad-lines skips such records and counts them") from None


def _tokenize(spec: DatasetSpec, loading: LoadSettings, files: Files) -> TokenStore:
    written = spec.renaming is not None and spec.renaming.format is not None
    declared = check_type(spec.type) if spec.type and not written else spec.renaming and spec.renaming.kind
    own = {"roles_to_train": spec.roles_to_train} if spec.roles_to_train is not None else {}
    settings = replace(loading.settings, train_on_eos=spec.train_on_eos, **own)
    loading = replace(loading, settings=settings)
    pieces = pieces_of(files, spec.path, spec.split, spec.shard)
    kind, first = (declared, None) if declared else detected(pieces, loading.skip_bad_lines)
    encoder = Encoder(kind, loading.settings, loading.tokenizer, loading.template, loading.vocab_size, first,
                      spec.renaming)  # fmt: skip
    store = _stored(pieces, kind, encoder, loading)
    store.kind, store.is_part = kind, any(numbers is not None for _, numbers in pieces)
    if not len(store):
        c, limit = store.counts, loading.settings.sequence_len
        why = f"samples dropped (longer than sequence_len {limit})"
        advice = ". Raise sequence_len, or set excess_length_strategy to truncate" if c.dropped else ""
        if loading.settings.excess_length_strategy == "truncate":
            why = f"samples without a target token in their first {limit} tokens (sequence_len)"
            advice = ". Raise sequence_len" if c.dropped else ""
        raise UserError(
            f"data set {spec.path}: nothing to {loading.purpose}: {c.dropped} {why}, {c.skipped} bad lines skipped"
            f"{advice}" + "".join(f"\n  {line}" for line in store.skipped[:3])
        )
    return store


def _stored(pieces: Sequence[Piece], kind: str, encoder: Encoder, loading: LoadSettings) -> TokenStore:
    """The store of these records, from the cache unless it is missing or corrupt there."""
    files = _digests(dict.fromkeys(file for file, _ in pieces))
    key = _key(_content(pieces, files), kind, loading, encoder.renaming)
    folder, keep = _store_folder(key, loading)
    if folder.is_dir():
        try:
            return TokenStore(folder, files)
        except CorruptStore as file:
            _log.warning("%s: token cache is corrupt (%s); re-tokenizing", folder, file)
        if not loading.read_only:
            shutil.rmtree(folder, ignore_errors=True)
        if folder.is_dir():  # read-only, or it could not be removed
            folder, keep = _temporary(key)
    with StoreWriter(folder) as writer:
        encode_files(writer, pieces, encoder, loading.workers, loading.skip_bad_lines)
        writer.finish()
    return TokenStore(folder, files, keep)


def split(stores: Sequence[SampleSet], val_set_size: float, seed: int) -> tuple[list[SampleSet], SampleSet | None]:
    """Hold out samples, drawn uniformly from all sources by `seed`: (training sources, validation source or None)."""
    if not val_set_size:
        return list(stores), None
    total = sum(len(s) for s in stores)
    size = int(val_set_size) if val_set_size >= 1 else max(1, round(val_set_size * total))
    if size >= total or val_set_size < 0:
        raise UserError(f"val_set_size {val_set_size} leaves nothing to train on: there are only {total} samples")
    chosen = np.zeros(total, bool)
    chosen[np.random.Generator(np.random.Philox(seed)).permutation(total)[:size]] = True
    parts = np.split(chosen, np.cumsum([len(s) for s in stores])[:-1])
    train = [Subset(s, np.flatnonzero(~part)) for s, part in zip(stores, parts, strict=True)]
    return train, Concat([Subset(s, np.flatnonzero(part)) for s, part in zip(stores, parts, strict=True)])


class Subset:
    """Selected samples of a source."""

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
    """Several sources, concatenated."""

    def __init__(self, sources: Sequence[SampleSet]):
        self.sources = list(sources)
        self.ends = np.cumsum([len(s) for s in sources])
        self.lengths = np.concatenate([s.lengths for s in sources])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        source, local = self._locate(index)
        return source[local]

    def place(self, index: int) -> tuple[str, int]:
        source, local = self._locate(index)
        return source.place(local)

    def _locate(self, index: int) -> tuple[SampleSet, int]:
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.sources[number], int(index - (self.ends[number - 1] if number else 0))


ENCODING = 8  # increase it when the same data gives other ids, labels or counts, so that no old cache is read


def _digests(files: Iterable[Path]) -> dict[str, str]:
    try:
        return {str(file): cache.file_digest(file) for file in files}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _content(pieces: Sequence[Piece], digests: dict[str, str]) -> list[object]:
    """What identifies the records of `pieces`: the digest of each file, with that of their numbers if not all."""
    return [
        digests[str(file)] if numbers is None else [digests[str(file)], cache.digest(numbers.tolist())]
        for file, numbers in pieces
    ]


def _key(content: Sequence[object], kind: str, loading: LoadSettings, renaming: Renaming | None = None) -> str:
    template = loading.template
    template_key = template and [template.source, template.tool_use, template.special_tokens]
    if template and "strftime_now" in f"{template.source}{template.tool_use}":
        template_key.append(template.now.date().isoformat())  # the rendered text has the date
    tokenizer_digest = loading.tokenizer and loading.tokenizer.digest
    how = [ENCODING, kind, asdict(loading.settings), tokenizer_digest, template_key, loading.vocab_size,
           loading.skip_bad_lines, renaming and asdict(renaming)]  # fmt: skip
    return cache.digest(content, how)


def _store_folder(key: str, loading: LoadSettings) -> tuple[Path, object]:
    """The folder of a store, existing or not, and for a temporary one the object whose end removes it."""
    folder = loading.cache_dir and loading.cache_dir / cache.STORES / key
    if folder and (folder.is_dir() or not loading.read_only and _writable(loading.cache_dir)):
        return folder, None
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
