"""Showing what a long task does and how far it is, on stderr."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from lorawgpu.util.duration import duration

INTERVAL = 5.0  # seconds between two lines where there is no terminal
DELAY = 2.0  # seconds before a bar, or what is being done, appears
REMINDER = 30.0  # seconds between lines of a task of unknown length
SIZE = os.terminal_size((80, 24))  # of a terminal that does not tell its own


def bar(stream, **options) -> tqdm:
    """A tqdm bar, disabled unless the stream is a terminal or the output of a notebook. Some terminals say that they
    have no columns and no lines, where tqdm would show nothing."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):  # not a terminal of the system
        size = SIZE
    known = {"dynamic_ncols": True} if all(size) else {"ncols": SIZE.columns, "nrows": SIZE.lines}
    return tqdm(file=stream, disable=not (stream.isatty() or in_notebook(stream)), **known, **options)


def in_notebook(stream) -> bool:
    """Whether a stream is shown in a notebook: it says that it is no terminal, but goes back to the line's start."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


@contextmanager
def progress(total: int | None, what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the amount done, of `total` (None: unknown).

    A bar on a terminal, else a line every few seconds; nothing if it is quick.
    """
    done, printed = 0, time.perf_counter()
    with bar(sys.stderr, total=total, unit=unit, unit_scale=True, desc=what, delay=DELAY) as shown:

        def advance(size: int) -> None:
            nonlocal done, printed
            shown.update(size)
            done += size
            if shown.disable and time.perf_counter() - printed >= INTERVAL:
                printed = time.perf_counter()
                part = "" if total is None else f"{min(1.0, done / max(1, total)):.0%} of "
                size = f"{_size(done, unit)} so far" if total is None else _size(total, unit)
                print(f"{what}: {part}{size}", file=sys.stderr, flush=True)

        yield advance


def _size(amount: int, unit: str) -> str:
    return f"{amount}{unit}" if amount < 1000 else tqdm.format_sizeof(amount, unit)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Say on stderr what is being done if it takes longer than a moment, and again every while, with the time so far.

    For work that cannot tell how far it is.
    """
    since, over = time.perf_counter(), threading.Event()

    def remind() -> None:
        wait, stream = DELAY, sys.stderr
        while not over.wait(wait):
            passed = time.perf_counter() - since
            text = what + (f": {duration(passed)} so far" if wait > DELAY else " ...")
            tqdm.write(text, file=stream)  # above a bar that may be shown
            stream.flush()
            wait = REMINDER

    thread = threading.Thread(target=remind, daemon=True, name="busy")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
