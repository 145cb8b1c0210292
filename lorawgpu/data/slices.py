"""Which records of a data set are used: slices of splits, and shards, with the meaning they have in the library
`datasets` of Hugging Face.

https://huggingface.co/docs/datasets/loading#slice-splits: `train[:500]`, `train[10%:20%]`, `train[-100:]`, and sums.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from lorawgpu.errors import UserError

_NUMBER = r"(-?\d[\d_]*)?(%)?"
_SLICE = re.compile(rf"\s*([^\[\]+:%]+?)\s*(?:\[\s*{_NUMBER}\s*:\s*{_NUMBER}\s*\])?\s*")
WANTED = "wanted a split, or slices such as train[:500], train[10%:20%], train[-100:], train[:10]+test[:10]"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Slice:
    """The records [start, stop) of a split; `percent`: in percent of them."""

    split: str
    start: int | None = None
    stop: int | None = None
    percent: bool = False

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def of(self, count: int) -> range:
        """The numbers of its records among `count`. Percent are rounded to the closest number, halves to the even one;
        a negative bound counts from the end, and what is out of range is cut off."""

        def bound(value: int | None, default: int) -> int:
            if value is None:
                return default
            value = round(value * count / 100) if self.percent else value
            return min(max(value + count if value < 0 else value, 0), count)

        return range(bound(self.start, 0), bound(self.stop, count))


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a data set, as axolotl takes it: shuffled by `seed`, then cut."""

    count: int
    index: int
    seed: int

    def of(self, total: int) -> np.ndarray:
        """The numbers of its records among `total`, ascending, int64. As `datasets.Dataset.shuffle(seed)`, which is
        NumPy's default generator, and then `shard(count, index)`, whose shards are contiguous."""
        order = np.random.default_rng(self.seed).permutation(total)
        return np.sort(np.array_split(order, self.count)[self.index])


def parse_split(text: str) -> tuple[Slice, ...]:
    """The slices of a `split`. UserError if it is none, or has percent beyond 100."""
    return tuple(_slice(part) for part in text.split("+"))


def _slice(part: str) -> Slice:
    match = _SLICE.fullmatch(part)
    start, start_unit, stop, stop_unit = match.groups()[1:] if match else (None,) * 4
    if not match or start_unit and start is None or stop_unit and stop is None:
        raise UserError(WANTED)
    bounds = [None if bound is None else int(bound) for bound in (start, stop)]
    percent = bool(start_unit or stop_unit)
    if percent and any(bound is not None and abs(bound) > 100 for bound in bounds):
        raise UserError("wanted at most 100%")
    return Slice(match[1], *bounds, percent)


def chosen(records: Iterable[Item], numbers: Sequence[int] | np.ndarray | None) -> Iterator[Item]:
    """The records of these numbers, ascending; all if None. Reads no further than the last one."""
    if numbers is None:
        yield from records
        return
    at, records = 0, iter(records)
    for number in numbers:
        yield from islice(records, int(number) - at, int(number) - at + 1)
        at = int(number) + 1


def take(parts: Sequence[tuple[Slice, Sequence[Item]]], counts: dict[Item, int], shard: Shard | None
           ) -> list[tuple[Item, np.ndarray]]:  # fmt: skip
    """(file, numbers of its records, ascending) of the slices of files, in order; of these, those of the shard.

    `parts`: (slice, the files of its split); `counts`: the records of each file.
    """
    out = []
    for part, files in parts:
        wanted, first = part.of(sum(counts[file] for file in files)), 0
        for file in files:
            inside = range(max(wanted.start, first), min(wanted.stop, first + counts[file]))
            out.append((file, np.arange(inside.start, inside.stop) - first))
            first += counts[file]
    if shard is not None:
        taken, first = shard.of(sum(len(numbers) for _, numbers in out)), 0
        for index, (file, numbers) in enumerate(out):
            low, high = np.searchsorted(taken, [first, first + len(numbers)])
            out[index] = file, numbers[taken[low:high] - first]
            first += len(numbers)
    return [(file, numbers) for file, numbers in out if len(numbers)]
