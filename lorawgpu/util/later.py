"""A call in a thread of its own, whose result is wanted later."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Later(Generic[Result]):
    """Runs `call` in the background from `start` on; `result` waits for it, and starts it if nobody has.

    The thread ends with the process: Ctrl-C does not wait for it.
    """

    def __init__(self, call: Callable[[], Result]):
        self._call, self._thread = call, threading.Thread(target=self._run, daemon=True)
        self._lock, self._started = threading.Lock(), False

    def start(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()

    def _run(self) -> None:
        self._value = self._error = None
        try:
            self._value = self._call()
        except BaseException as error:  # raised again where the result is wanted
            self._error = error

    def result(self) -> Result:
        """The value that `call` returned. Raises what it raised."""
        self.start()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
