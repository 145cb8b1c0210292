"""Communication between processes that train one adapter together. A single process exchanges nothing.

All processes read the same config and data and take the same steps. Each computes its share of the micro-batches of a
step or an evaluation.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from lorawgpu.gpu import Device, Tensor

Item = TypeVar("Item")


@dataclass(frozen=True)
class StepSums:
    """The tensors that hold a process's sums over its micro-batches of a step.

    grads: f32 [adapter size], sums over targets, not means. totals: u32 [2] each, fixed point
    (`ops.cross_entropy.fixed_point`), so that sums are exact in any order. state: word 0 is the flag of a bad step,
    word 1 the lowest id of a record that was not finite (ops/step_state.py).
    """

    device: Device
    grads: Tensor
    totals: tuple[Tensor, ...]
    state: Tensor


class Exchange(Protocol):
    """One process among `size`. All processes must make the same calls in the same order."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes to disk and to the terminal."""

    def sum_step(self, sums: StepSums, divisor: int) -> int:
        """Replace `sums` by the sums over all processes, and return the sum of their divisors.

        Called between backward and update. Gradients and totals are added in rank order; a step that is bad anywhere is
        bad everywhere, with the lowest record id. So all processes make the same update, or all skip it.
        """

    def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The `values` of every process, in rank order."""


class Solo:
    """A single process: nothing is exchanged or read back."""

    rank, size, leads = 0, 1, True

    def sum_step(self, sums: StepSums, divisor: int) -> int:
        return divisor

    def gather(self, values: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [values]


def share(exchange: Exchange, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    """The items that this process computes, each with its index among all. Only this function decides which."""
    return islice(enumerate(items), exchange.rank, None, exchange.size)
