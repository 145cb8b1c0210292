"""What the processes that train one adapter together tell each other: nothing, for a single one.

Every process reads the same config and data and goes through the same steps; of the micro-batches of a step or of an
evaluation each computes its share.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from lorawgpu.gpu import Device, Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class StepSums:
    """What one process has summed over its micro-batches of a step, where it lies on its device.

    grads: f32 [adapter size], sums over targets and not means. totals: u32 [2] each, fixed point
    (`ops.cross_entropy.fixed_point`), so that sums are exact in any order. state: word 0 is the flag of a bad step,
    word 1 the lowest id of a record that was not finite (ops/step_state.py).
    """

    device: Device
    grads: Tensor
    totals: tuple[Tensor, ...]
    state: Tensor


class Exchange(Protocol):
    """One process among `size`. All of them call these methods equally often and in the same order."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes to disk and terminal."""

    def sum_step(self, sums: StepSums, divisor: int) -> int:
        """Between the backward and the update: replace `sums` by those of all processes; the sum of their divisors.

        Gradients and totals are added in rank order, a step that is bad anywhere is bad everywhere, and the lowest
        record id counts: so all processes make the same update, or skip it together.
        """

    def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The `values` of every process, in rank order."""


class Solo:
    """The only process: nothing is exchanged and nothing read back."""

    rank, size, leads = 0, 1, True

    def sum_step(self, sums: StepSums, divisor: int) -> int:
        return divisor

    def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [values]


def share(exchange: Exchange, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    """The items that this process computes, each with its index among all: here, and only here, it is decided which."""
    return islice(enumerate(items), exchange.rank, None, exchange.size)
