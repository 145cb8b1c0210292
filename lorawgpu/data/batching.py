"""Tokenized samples laid flat: a micro-batch is one row of sequences one after another (DESIGN section 2).

Packing is exact, and padding exists only as the tail up to a bucketed capacity.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

IGNORE = -100
ALIGN = 128  # kernels tile tokens by 128 (DESIGN section 5)


@dataclass(frozen=True)
class Sample:
    """One tokenized sequence. `labels[t]` is `input_ids[t]` where that token is trained, else -100."""

    input_ids: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def targets(self) -> int:
        """Tokens that carry loss: the first label of a sequence has nothing before it and never counts."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE))


class SampleSet(Protocol):
    """Anything that hands out samples by index and knows their lengths without reading them."""

    lengths: np.ndarray  # int [samples]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def place(self, index: int) -> tuple[str, int]: ...  # file and line; asked for only where a step went wrong


@dataclass(frozen=True)
class MicroBatch:
    """Flat tokens of several sequences; every array int32 and of length capacity unless said otherwise."""

    ids: np.ndarray
    position: np.ndarray  # within the own sequence, for RoPE
    slot: np.ndarray  # where k and v of this row go: t itself in training
    kv_start: np.ndarray  # first row of the own sequence: row t attends to kv_start..slot
    segment_end: np.ndarray  # exclusive end of the own sequence: bounds the dK/dV pass
    target_rows: np.ndarray  # [targets] rows whose logits carry loss
    target_ids: np.ndarray  # [targets] what they predict
    tokens: int  # rows that are no tail
    samples: int
    row_weights: np.ndarray | None = None  # float32 [targets] for an objective that weighs target rows; None: all 1

    @property
    def capacity(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        return len(self.target_ids)


def flatten(samples: Sequence[Sample], capacity: int) -> MicroBatch:
    """Lay samples one after another into `capacity` rows (DESIGN section 2). ValueError when they do not fit."""
    tokens = sum(len(s) for s in samples)
    if tokens > capacity:
        raise ValueError(f"{tokens} tokens do not fit a capacity of {capacity}")
    rows = np.arange(capacity, dtype=np.int32)
    ids, position = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    kv_start, segment_end = rows.copy(), rows + 1  # a tail token sees itself alone and stays finite
    targets = np.full(capacity, IGNORE, np.int32)
    start = 0
    for sample in samples:
        end = start + len(sample)
        ids[start:end] = sample.input_ids
        position[start:end] = rows[: len(sample)]
        kv_start[start:end] = start
        segment_end[start:end] = end
        targets[start : max(start, end - 1)] = sample.labels[1:]  # the target of row t is labels[t + 1]
        start = end
    target_rows = np.flatnonzero(targets != IGNORE).astype(np.int32)
    return MicroBatch(
        ids, position, rows, kv_start, segment_end, target_rows, targets[target_rows], tokens, len(samples)
    )


def bucket(tokens: int, limit: int | None = None) -> int:
    """The capacity that holds `tokens`: 16, 32, 64, then multiples of 128, four sizes an octave from 512 on.

    Few sizes, because every capacity costs a plan; `limit` (a multiple of 128, or a bucket) is the largest.
    """
    size = next((small for small in (16, 32, 64) if tokens <= small), None)
    if size is None:
        step = max(ALIGN, 1 << max(0, (tokens - 1).bit_length() - 3))
        size = -(-tokens // step) * step
    return size if limit is None or tokens > limit else min(size, limit)


def token_capacity(micro_batch_size: int, sequence_len: int) -> int:
    """Rows of the largest micro-batch: the product of both, rounded up to what kernels work in."""
    tokens = micro_batch_size * sequence_len
    return bucket(tokens) if tokens < ALIGN else -(-tokens // ALIGN) * ALIGN


def sequential(source: SampleSet, capacity: int) -> Iterator[MicroBatch]:
    """Every sample once, in order, as many to a micro-batch as fit: for evaluation."""
    start = 0
    while start < len(source):
        total = np.cumsum(source.lengths[start : start + capacity])
        end = start + max(1, int(np.searchsorted(total, capacity, side="right")))
        samples = [source[i] for i in range(start, end)]
        yield flatten(samples, bucket(sum(len(s) for s in samples), capacity))
        start = end
