"""Prepare the next items of an iterator in a background thread."""

import queue
import threading
from collections.abc import Iterable, Iterator

DEPTH = 2


class Prefetch:
    """Iterates over `items`, at most `depth` ahead; an exception of the iterator is raised where its item was due.

    A context manager: leaving it stops the thread.
    """

    def __init__(self, items: Iterable, depth: int = DEPTH):
        self._queue: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(iter(items),), daemon=True, name="prefetch")
        self._thread.start()

    def __enter__(self) -> Iterator:
        return self._drain()

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def _drain(self) -> Iterator:
        while True:
            item, error = self._queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def _fill(self, items: Iterator) -> None:
        error = None
        while error is None and not self._stop.is_set():
            item = None
            try:
                item = next(items)
            except BaseException as raised:
                error = raised
            self._put((item, error))

    def _put(self, entry: tuple) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(entry, timeout=0.1)
            except queue.Full:
                continue
