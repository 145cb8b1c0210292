"""Calls in threads, for work that NumPy does without holding Python's lock."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
MOST_THREADS = 8


class InOrder:
    """Calls that run in threads, a few ahead of their results, which are used in order in the caller's thread.

    Leaving the context uses the last results; leaving it with an error drops the calls that have not started.
    """

    def __init__(self) -> None:
        self._threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._pool, self._running = ThreadPoolExecutor(self._threads), deque()

    def __enter__(self) -> "InOrder":
        return self

    def put(self, call: Callable[[], Result], use: Callable[[Result], None]) -> None:
        """Start a call whose result goes to `use`. Raises what an earlier call or use raised."""
        self._running.append((self._pool.submit(call), use))
        if len(self._running) > self._threads + 1:
            self._use_next()

    def _use_next(self) -> None:
        running, use = self._running.popleft()
        use(running.result())

    def __exit__(self, error, *_) -> None:
        try:
            while self._running and error is None:
                self._use_next()
        finally:
            self._pool.shutdown(cancel_futures=True)
