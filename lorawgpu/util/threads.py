"""Calls in threads, for work that NumPy does without holding Python's lock."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Result = TypeVar("Result")
MOST_THREADS = 8


def in_order(calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """The results of `calls`, in order, computed a few calls ahead."""
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        rest = iter(calls)
        running = deque(pool.submit(call) for call in islice(rest, threads + 1))
        while running:
            result = running.popleft().result()
            running.extend(pool.submit(call) for call in islice(rest, 1))
            yield result
