"""Showing how far a long task is."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

INTERVAL = 5.0  # seconds between two lines where there is no terminal
DELAY = 2.0  # seconds before a bar appears


@contextmanager
def progress(total: int, what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the amount done, of `total`. A bar on a terminal, else a line every few seconds;
    nothing if it is quick."""
    done, printed = 0, time.perf_counter()
    with tqdm(total=total, unit=unit, unit_scale=True, desc=what, disable=None, delay=DELAY) as bar:

        def advance(size: int) -> None:
            nonlocal done, printed
            bar.update(size)
            done += size
            if bar.disable and time.perf_counter() - printed >= INTERVAL:
                printed = time.perf_counter()
                part = min(1.0, done / max(1, total))
                print(f"{what}: {part:.0%} of {tqdm.format_sizeof(total, unit)}", file=sys.stderr, flush=True)

        yield advance
