"""Which samples make up an optimizer step: a reproducible order, packed micro-batches, exact resume.

The order of an epoch depends only on (seed, epoch) and the data sets, so a few counters suffice to resume a run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lorawgpu.data.batching import MicroBatch, SampleSet, bucket, flatten
from lorawgpu.errors import UserError

BUFFER_BINS = 128  # size of a packing buffer, in capacities; its one half-filled bin costs 0.4% on average
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1000  # limits on a data set's weight; an epoch keeps weight * samples indices in memory


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """First-fit decreasing: bins of indices into `lengths`, none above `capacity`, each index in exactly one bin."""
    bins: list[list[int]] = []
    free = np.full(len(lengths) + 1, capacity, np.int64)
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        length = int(lengths[index])
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into a capacity of {capacity}")
        slot = int(np.argmax(free[: len(bins) + 1] >= length))
        if slot == len(bins):
            bins.append([])
        bins[slot].append(int(index))
        free[slot] -= length
    return [np.array(sorted(members), np.int64) for members in bins]


@dataclass(frozen=True)
class DataPosition:
    """Position in the data, in samples consumed by finished optimizer steps; prefetched samples do not count.

    `packing_start`: where the current packing buffer begins. `packing_batches`: how many of its bins are done.
    `mixing`: samples drawn from each data set since the start of the run.
    """

    epoch: int = 0
    consumed: int = 0
    packing_start: int = 0
    packing_batches: int = 0
    mixing: tuple[int, ...] = ()

    def to_dict(self) -> dict:
        """JSON for a checkpoint. The key names are fixed by existing checkpoints."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "window_start": self.packing_start,
            "window_batches": self.packing_batches,
            "mixing": list(self.mixing),
        }

    @staticmethod
    def from_dict(data: dict) -> "DataPosition":
        """The inverse of `to_dict`. KeyError if a key is missing."""
        fields = ("epoch", "consumed", "window_start", "window_batches")
        return DataPosition(*(data[name] for name in fields), tuple(data["mixing"]))


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step, the position after it, and the samples that it uses."""

    micro_batches: list[MicroBatch]
    position: DataPosition
    ends_epoch: bool
    samples: np.ndarray  # int64 global sample ids, for `Batches.place`

    @property
    def tokens(self) -> int:
        return sum(b.tokens for b in self.micro_batches)


@dataclass(frozen=True)
class BatchSettings:
    """`capacity`: rows of the largest micro-batch (`token_capacity`). `packing` fills it; otherwise samples count."""

    seed: int
    micro_batch_size: int
    accumulation: int
    capacity: int
    packing: bool


class Batches:
    """The batches of all optimizer steps, from a weighted mix of sources, starting at any saved position.

    A source's weight is how often an epoch uses each of its samples: 2 is twice, 0.5 is every other epoch.
    """

    def __init__(self, sources: Sequence[SampleSet], settings: BatchSettings, weights: Sequence[float] | None = None):
        self.sources, self.settings = list(sources), settings
        weights = [1.0] * len(self.sources) if weights is None else list(weights)
        self.offsets = np.concatenate([[0], np.cumsum([len(s) for s in self.sources])]).astype(np.int64)
        self.lengths = np.concatenate([np.asarray(s.lengths, np.int64) for s in self.sources])
        self.draws = [_draws(weight, len(s)) for weight, s in zip(weights, self.sources, strict=True)]

    def order(self, epoch: int) -> np.ndarray:
        """Global sample ids of an epoch, int64 [sum of draws]. Depends only on seed, epoch and the mix."""
        parts = [
            self.offsets[i] + _stream(self.settings.seed, i, len(source), epoch * draws, draws)
            for i, (source, draws) in enumerate(zip(self.sources, self.draws, strict=True))
        ]
        ids = np.concatenate(parts)
        return ids[_rng(self.settings.seed, 1, epoch).permutation(len(ids))]

    def step_batches(self, position: DataPosition | None = None) -> Iterator[StepBatch]:
        """Yield steps from `position` on, without end. The last step of an epoch may have fewer micro-batches.

        UserError if there is no sample, or if `position` comes from other sources, weights or settings.
        """
        if not len(self.lengths):
            raise UserError("there are no samples to train on: all data sets are empty")
        position = DataPosition(mixing=(0,) * len(self.sources)) if position is None else position
        self._check(position)
        while True:
            for step in self._epoch(position):
                yield step
            position = step.position

    def steps(self, epoch: int) -> int:
        """Exact number of optimizer steps in an epoch. With packing, this packs the lengths of the whole epoch."""
        order = self.order(epoch)
        micro_batches = start = 0
        while start < len(order):
            bins, start = self._plan(order, start, epoch)
            micro_batches += len(bins)
        return -(-micro_batches // self.settings.accumulation)

    def epochs(self, position: DataPosition) -> float:
        """Epochs from the start to `position`."""
        return position.epoch + position.consumed / sum(self.draws)

    def place(self, sample: int) -> tuple[str, int]:
        """The file and line of a sample, by its global id."""
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
        """The micro-batches (arrays of global ids) of the packing buffer at `start`, and where the buffer ends."""
        if not self.settings.packing:
            end = min(start + self.settings.micro_batch_size, len(order))
            return [order[start:end]], end
        room = BUFFER_BINS * self.settings.capacity
        total = np.cumsum(self.lengths[order[start : start + 2 * room]])  # a sample has at least one token
        end = start + int(np.searchsorted(total, room)) + 1
        if total[-1] < 1.5 * room:  # a short remainder joins this buffer, because it would pack worse by itself
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
                f"the saved data position {position.to_dict()} does not match these data sets, weights and batch "
                "settings: resume with the data and config of the checkpoint"
            )


def _draws(weight: float, samples: int) -> int:
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise UserError(f"the weight of a data set is {weight}; wanted {MIN_WEIGHT} to {MAX_WEIGHT}")
    return max(1, round(weight * samples)) if samples else 0


def _rng(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *purpose])))


def _stream(seed: int, source: int, size: int, start: int, count: int) -> np.ndarray:
    """Entries start..start+count of an endless stream: one permutation of the source after another."""
    if not count:
        return np.empty(0, np.int64)
    first, last = start // size, (start + count - 1) // size
    passes = [_rng(seed, 3, source, p).permutation(size) for p in range(first, last + 1)]
    return np.concatenate(passes)[start - first * size : start - first * size + count]
