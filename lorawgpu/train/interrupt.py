"""Ctrl-C, SIGTERM and a terminal that goes away: the first asks for an orderly end, the second ends at once."""

import signal
from collections.abc import Callable

HANG_UP = getattr(signal, "SIGHUP", None)  # Windows has none


def exit_code(signum: int) -> int:
    """The shell's convention: 129 after SIGHUP, 130 after SIGINT, 143 after SIGTERM."""
    return 128 + signum


class Interrupts:
    """While entered, `signum` becomes the first SIGINT, SIGTERM or SIGHUP that arrives, and `notice` is called with its
    name.

    After it the system's own handling is back, so that the next one kills, also in the middle of a GPU call; but for
    SIGHUP, which a terminal's end can bring twice. What runs under `nohup` goes on.
    """

    def __init__(self, notice: Callable[[str], None]):
        self.notice, self.signum, self._before = notice, None, {}

    def __enter__(self) -> "Interrupts":
        hang_up = HANG_UP is not None and signal.getsignal(HANG_UP) != signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *([HANG_UP] if hang_up else [])):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _frame) -> None:
        self.signum = signum
        for number in self._before:
            signal.signal(number, signal.SIG_IGN if number == HANG_UP else signal.SIG_DFL)
        self.notice(signal.Signals(signum).name)
