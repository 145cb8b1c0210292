"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends the process at once."""

import signal
from collections.abc import Callable


class Interrupts:
    """While entered, `signum` becomes the first SIGINT or SIGTERM that arrives, and `notice` is called with its name.

    After it the system's own handling is back, so that the next one kills, also in the middle of a GPU call.
    """

    def __init__(self, notice: Callable[[str], None]):
        self.notice, self.signum, self._before = notice, None, {}

    @property
    def exit_code(self) -> int:
        """The shell's convention: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + self.signum

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _frame) -> None:
        self.signum = signum
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        self.notice(signal.Signals(signum).name)
