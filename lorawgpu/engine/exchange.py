"""Communication between processes that train one adapter together. A single process exchanges nothing.

All processes read the same config and data and take the same steps. Each computes its share of the micro-batches of a
step or an evaluation, and updates its share of the adapter (engine/shards.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np

Item = TypeVar("Item")
Result = TypeVar("Result")


class Exchange(Protocol):
    """One process among `size`. All processes must make the same calls in the same order.

    local_rank: its number among the processes of its machine. names: who the ranks are, for messages.
    leads: whether this is the process that writes to disk and to the terminal.
    """

    rank: int
    size: int
    local_rank: int
    names: list[str]

    @property
    def leads(self) -> bool: ...

    def introduce(self, adapter: str) -> None:
        """Tell all ranks this one's machine and adapter."""

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every process, in rank order: whatever JSON can hold."""

    def agree(self, request: int) -> int:
        """The weightiest request (util/requests.py) that any process has, or 0. Called between two steps."""

    def broadcast(self, data: bytes | None) -> bytes:
        """The `data` of rank 0, on every rank."""

    def swap(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        """Send `sends[j]` to rank j, and fill `receives[j]` with what rank j sends here.

        Arrays are contiguous, of one data type, and may be empty. The one for this rank itself is copied.
        """

    def later(self, call: Callable[[], Result]) -> "Future[Result]":
        """Run `call`, which may use `swap`, next to what the caller does. Calls run one after another, in order.

        They are in order among themselves only: the caller may communicate meanwhile.
        """

    def set_timeout(self, seconds: float) -> None:
        """How long a process may be silent."""

    def judged(self, fallback: Callable[[], str]) -> AbstractContextManager:
        """Inside, this process must make progress, or the job ends with a message that includes `fallback`."""

    def working(self) -> AbstractContextManager:
        """Inside, it may take long all the same, for something that is no step: compiling, evaluating, saving."""

    def alive(self) -> None:
        """Say that this process makes progress: its device has finished a micro-batch."""

    def signalled(self, text: Callable[[], str], code: int) -> None:
        """This process was asked to stop. If the others do not `agree` in time, end the job with `text` and `code`."""


class Solo:
    """A single process: nothing is exchanged or read back."""

    rank, size, local_rank, leads = 0, 1, 0, True
    names = ["this process"]

    def introduce(self, adapter: str) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, request: int) -> int:
        return request

    def broadcast(self, data: bytes | None) -> bytes:
        return data

    def swap(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        receives[0][...] = sends[0]

    def later(self, call: Callable[[], Result]) -> "Future[Result]":
        return at_once(call)

    def set_timeout(self, seconds: float) -> None:
        pass

    def judged(self, fallback: Callable[[], str]) -> AbstractContextManager:
        return nullcontext()

    def working(self) -> AbstractContextManager:
        return nullcontext()

    def alive(self) -> None:
        pass

    def signalled(self, text: Callable[[], str], code: int) -> None:
        pass


def at_once(call: Callable[[], Result]) -> "Future[Result]":
    """The future of a call that is made now."""
    future = Future()
    future.set_result(call())
    return future


def owners(shares: Sequence[int]) -> list[int]:
    """The rank that computes each micro-batch of a full step, each rank as often as `shares` says, evenly mixed.

    Equal shares take turns. So the first micro-batches of a shorter step are spread over all ranks too.
    """
    turns = [((turn + 0.5) / share, rank) for rank, share in enumerate(shares) for turn in range(share)]
    return [rank for _, rank in sorted(turns)]


def share(rank: int, shares: Sequence[int], items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
    """The items that `rank` computes, each with its index among all. Only this function decides which."""
    order = owners(shares)
    return ((i, item) for i, item in enumerate(items) if order[i % len(order)] == rank)
