"""Micro-batches: tokenized sequences laid one after another, padded only at the end, up to a bucketed capacity.

See docs/DESIGN.md, "Tokens, slots and the KV cache".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

IGNORE = -100
ALIGN = 128  # tokens; kernels use tiles of up to 128 (docs/DESIGN.md, "Linear layers")


@dataclass(frozen=True)
class Sample:
    """One tokenized sequence. `labels[t]` is `input_ids[t]` if that token carries loss, otherwise -100."""

    input_ids: np.ndarray  # int32 [n]
    labels: np.ndarray  # int32 [n]

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def targets(self) -> int:
        """Number of target tokens. A sequence's first token is never one, because no token precedes it."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE))


class SampleSet(Protocol):
    """Samples by index, with their lengths known without reading them."""

    lengths: np.ndarray  # int [samples]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def place(self, index: int) -> tuple[str, int]: ...  # file and line, for reports of bad steps


class SampleList(list):
    """Samples in memory, as a SampleSet for evaluation."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(sample) for sample in self])


@dataclass(frozen=True)
class MicroBatch:
    """Flat tokens of several sequences. Arrays are int32 of length capacity unless stated otherwise."""

    ids: np.ndarray
    position: np.ndarray  # position within its sequence, for RoPE
    slot: np.ndarray  # the slot for its k and v; in training, the row number
    kv_start: np.ndarray  # first slot of its sequence; row t attends to kv_start..slot
    segment_end: np.ndarray  # exclusive end of its sequence, which bounds the dK/dV pass
    target_rows: np.ndarray  # [targets] rows whose logits carry loss
    target_ids: np.ndarray  # [targets] the tokens that they predict
    tokens: int  # rows before the tail
    samples: int
    row_weights: np.ndarray | None = None  # float32 [targets], for an objective with weighted rows; None: all 1

    @property
    def capacity(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        return len(self.target_ids)


def flatten(samples: Sequence[Sample], capacity: int) -> MicroBatch:
    """Lay samples one after another into `capacity` rows. ValueError if they do not fit."""
    tokens = sum(len(s) for s in samples)
    if tokens > capacity:
        raise ValueError(f"{tokens} tokens do not fit into a capacity of {capacity}")
    rows = np.arange(capacity, dtype=np.int32)
    ids, position = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    kv_start, segment_end = rows.copy(), rows + 1  # a tail row sees only itself, so it stays finite
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
    """The smallest bucketed capacity that holds `tokens`: 16, 32, 64, multiples of 128, four per octave from 512 on.

    There are few, because every capacity costs a plan. `limit` (a multiple of 128, or a bucket) is the largest.
    """
    size = next((small for small in (16, 32, 64) if tokens <= small), None)
    if size is None:
        step = max(ALIGN, 1 << max(0, (tokens - 1).bit_length() - 3))
        size = -(-tokens // step) * step
    return size if limit is None or tokens > limit else min(size, limit)


def token_capacity(micro_batch_size: int, sequence_len: int) -> int:
    """Rows of the largest micro-batch: the product of both, rounded up to a multiple of ALIGN or a smaller bucket."""
    tokens = micro_batch_size * sequence_len
    return bucket(tokens) if tokens < ALIGN else -(-tokens // ALIGN) * ALIGN


def sequential(source: SampleSet, capacity: int) -> Iterator[MicroBatch]:
    """Micro-batches with every sample once, in order, as many per micro-batch as fit. For evaluation."""
    start = 0
    while start < len(source):
        total = np.cumsum(source.lengths[start : start + capacity])
        end = start + max(1, int(np.searchsorted(total, capacity, side="right")))
        samples = [source[i] for i in range(start, end)]
        yield flatten(samples, bucket(sum(len(s) for s in samples), capacity))
        start = end
