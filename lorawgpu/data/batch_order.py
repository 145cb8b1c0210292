"""Which samples make an optimizer step: an exact order, packed micro-batches, an exact resume.

The order of an epoch is a function of (seed, epoch) alone, so nothing but a few counters has to be saved to continue
where a run stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lorawgpu.data.batching import MicroBatch, SampleSet, bucket, flatten
from lorawgpu.errors import UserError

BUFFER_BINS = 128  # capacities that one packing buffer holds: its one half-filled bin costs 0.4% on average
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1000  # weights of a data set: an epoch holds weight * samples numbers in memory


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """First-fit decreasing: bins of indices into `lengths`, no bin above `capacity`, every index in exactly one."""
    bins: list[list[int]] = []
    free = np.full(len(lengths) + 1, capacity, np.int64)
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        length = int(lengths[index])
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit a capacity of {capacity}")
        slot = int(np.argmax(free[: len(bins) + 1] >= length))
        if slot == len(bins):
            bins.append([])
        bins[slot].append(int(index))
        free[slot] -= length
    return [np.array(sorted(members), np.int64) for members in bins]


@dataclass(frozen=True)
class DataPosition:
    """Where training stands, in samples consumed by finished optimizer steps (never prefetched).

    `packing_start` and `packing_batches` say where the open packing buffer begins and how many of its bins are done;
    `mixing` counts the samples drawn from each data set since the start of the run.
    """

    epoch: int = 0
    consumed: int = 0
    packing_start: int = 0
    packing_batches: int = 0
    mixing: tuple[int, ...] = ()

    def to_dict(self) -> dict:
        """JSON, under the keys of every checkpoint so far."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "window_start": self.packing_start,
            "window_batches": self.packing_batches,
            "mixing": list(self.mixing),
        }

    @staticmethod
    def from_dict(data: dict) -> "DataPosition":
        """The position that `to_dict` wrote. KeyError when a key is missing."""
        fields = ("epoch", "consumed", "window_start", "window_batches")
        return DataPosition(*(data[name] for name in fields), tuple(data["mixing"]))


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step, the position once that step is done, and which samples it took."""

    micro_batches: list[MicroBatch]
    position: DataPosition
    ends_epoch: bool
    samples: np.ndarray  # int64: `Batches.place` says where they come from

    @property
    def tokens(self) -> int:
        return sum(b.tokens for b in self.micro_batches)


@dataclass(frozen=True)
class BatchSettings:
    """`capacity`: rows of the largest micro-batch (`token_capacity`); `packing` fills it, else samples are counted."""

    seed: int
    micro_batch_size: int
    accumulation: int
    capacity: int
    packing: bool


class Batches:
    """The batches of optimizer steps from a weighted mix of sources, epoch after epoch, from any saved position.

    A weight is how often an epoch sees each sample of its source: 1 once, 2 twice, 0.5 every other epoch.
    """

    def __init__(self, sources: Sequence[SampleSet], settings: BatchSettings, weights: Sequence[float] | None = None):
        self.sources, self.settings = list(sources), settings
        weights = [1.0] * len(self.sources) if weights is None else list(weights)
        self.offsets = np.concatenate([[0], np.cumsum([len(s) for s in self.sources])]).astype(np.int64)
        self.lengths = np.concatenate([np.asarray(s.lengths, np.int64) for s in self.sources])
        self.draws = [_draws(weight, len(s)) for weight, s in zip(weights, self.sources, strict=True)]

    def order(self, epoch: int) -> np.ndarray:
        """Global sample ids of an epoch, int64 [sum of draws]: a function of seed, epoch and the mix alone."""
        parts = [
            self.offsets[i] + _stream(self.settings.seed, i, len(source), epoch * draws, draws)
            for i, (source, draws) in enumerate(zip(self.sources, self.draws, strict=True))
        ]
        ids = np.concatenate(parts)
        return ids[_rng(self.settings.seed, 1, epoch).permutation(len(ids))]

    def step_batches(self, position: DataPosition | None = None) -> Iterator[StepBatch]:
        """Endless: epoch after epoch from `position`. The last step of an epoch may hold fewer micro-batches.

        UserError when there is no sample, or when `position` was not made by these sources, weights and settings.
        """
        if not len(self.lengths):
            raise UserError("there is no sample to train on: every data set is empty")
        position = DataPosition(mixing=(0,) * len(self.sources)) if position is None else position
        self._check(position)
        while True:
            for step in self._epoch(position):
                yield step
            position = step.position

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch, exactly: with packing this packs the lengths of the whole epoch."""
        order = self.order(epoch)
        micro_batches = start = 0
        while start < len(order):
            bins, start = self._plan(order, start, epoch)
            micro_batches += len(bins)
        return -(-micro_batches // self.settings.accumulation)

    def place(self, sample: int) -> tuple[str, int]:
        """The file and the line of one of a step's samples."""
        owner = int(np.searchsorted(self.offsets, sample, side="right")) - 1
        return self.sources[owner].place(int(sample - self.offsets[owner]))

    def _epoch(self, position: DataPosition) -> Iterator[StepBatch]:
        order, epoch = self.order(position.epoch), position.epoch
        start, skip = position.packing_start, position.packing_batches
        consumed, mixing = position.consumed, np.array(position.mixing)
        pending: list[MicroBatch] = []
        taken: list[np.ndarray] = []
        while start < len(order):
            bins, after = self._plan(order, start, epoch)
            for done in range(skip + 1, len(bins) + 1):
                ids = bins[done - 1]
                pending.append(self._flatten(ids))
                taken.append(ids)
                consumed += len(ids)
                mixing = mixing + self._per_source(ids)
                ends_epoch = done == len(bins) and after == len(order)
                if len(pending) == self.settings.accumulation or ends_epoch:
                    place = (after, 0) if done == len(bins) else (start, done)
                    here = (epoch + 1, 0, 0, 0) if ends_epoch else (epoch, consumed, *place)
                    position = DataPosition(*here, tuple(mixing.tolist()))
                    yield StepBatch(pending, position, ends_epoch, np.concatenate(taken))
                    pending, taken = [], []
            start, skip = after, 0

    def _plan(self, order: np.ndarray, start: int, epoch: int) -> tuple[list[np.ndarray], int]:
        """The micro-batches (arrays of global ids) of the packing buffer that begins at `start`, and its end."""
        if not self.settings.packing:
            end = min(start + self.settings.micro_batch_size, len(order))
            return [order[start:end]], end
        room = BUFFER_BINS * self.settings.capacity
        total = np.cumsum(self.lengths[order[start : start + 2 * room]])  # a sample has at least one token
        end = start + int(np.searchsorted(total, room)) + 1
        if total[-1] < 1.5 * room:  # a short rest joins the buffer before it: it would pack worse alone
            end = len(order)
        ids = order[start:end]
        bins = pack(self.lengths[ids], self.settings.capacity)
        shuffled = _rng(self.settings.seed, 2, epoch, start).permutation(len(bins))  # FFD puts long samples first
        return [ids[bins[i]] for i in shuffled], min(end, len(order))

    def _flatten(self, ids: np.ndarray) -> MicroBatch:
        capacity = bucket(int(self.lengths[ids].sum()), self.settings.capacity)
        owners = np.searchsorted(self.offsets, ids, side="right") - 1
        return flatten([self.sources[o][int(i - self.offsets[o])] for o, i in zip(owners, ids, strict=True)], capacity)

    def _per_source(self, ids: np.ndarray) -> np.ndarray:
        owners = np.searchsorted(self.offsets, ids, side="right") - 1
        return np.bincount(owners, minlength=len(self.sources))

    def _check(self, position: DataPosition) -> None:
        order = self.order(position.epoch)
        start, batches = position.packing_start, position.packing_batches
        bins = self._plan(order, start, position.epoch)[0] if start < len(order) else []
        done = np.concatenate([order[:start], *bins[:batches]])
        mixing = position.epoch * np.array(self.draws) + self._per_source(done)
        if batches >= max(1, len(bins)) or position.consumed != len(done) or position.mixing != tuple(mixing.tolist()):
            raise UserError(
                f"the saved data position {position.to_dict()} does not belong to these data sets, weights and batch "
                "settings: resume with the data and config of the checkpoint"
            )


def _draws(weight: float, samples: int) -> int:
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise UserError(f"the weight of a data set is {weight}; wanted {MIN_WEIGHT} to {MAX_WEIGHT}")
    return max(1, round(weight * samples)) if samples else 0


def _rng(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *purpose])))


def _stream(seed: int, source: int, size: int, start: int, count: int) -> np.ndarray:
    """Places start..start+count of an endless stream: one permutation of the source after another."""
    if not count:
        return np.empty(0, np.int64)
    first, last = start // size, (start + count - 1) // size
    passes = [_rng(seed, 3, source, p).permutation(size) for p in range(first, last + 1)]
    return np.concatenate(passes)[start - first * size : start - first * size + count]
