"""Ctrl-C, SIGTERM and a closed terminal: the first signal asks for an orderly stop, the second kills."""

import signal
import threading
from collections.abc import Callable

HANG_UP = getattr(signal, "SIGHUP", None)  # not on Windows


def exit_code(signum: int) -> int:
    """The shell's convention: 129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM."""
    return 128 + signum


class Interrupted(KeyboardInterrupt):
    """A run that a signal stopped, after saving. `code`: its exit code."""

    def __init__(self, code: int):
        super().__init__(f"stopped by {signal.Signals(code - 128).name}, after saving a checkpoint")
        self.code = code


class Interrupts:
    """A context manager that sets `signum` to the first SIGINT, SIGTERM or SIGHUP and calls `notice` with its name.

    Then it restores the default handling, so that the next signal kills even in the middle of a GPU call. SIGHUP is
    ignored instead, because a closed terminal may send it twice. Under `nohup`, SIGHUP stays ignored throughout.
    Outside the main thread, where Python forbids handlers, it does nothing.
    """

    def __init__(self, notice: Callable[[str], None]):
        self.notice, self.signum, self._before = notice, None, {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is not threading.main_thread():
            return self
        hang_up = HANG_UP is not None and signal.getsignal(HANG_UP) != signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([HANG_UP] if hang_up else [])):
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _frame) -> None:
        self.signum = signum
        for number in self._before:
            signal.signal(number, signal.SIG_IGN if number == HANG_UP else signal.SIG_DFL)
        self.notice(signal.Signals(signum).name)
