"""The border between two steps: the one place where a run is asked whether to stop or to save.

Whoever asks is a function of the step's metrics that returns "stop", "save" or None: `on_step` of the Python API is
one. Signals are asked here too. All processes of a job do what one of them was asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lorawgpu.engine.exchange import Exchange
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.train.interrupt import Interrupts
from lorawgpu.util.requests import SAVE, SIGNAL, STOP

REQUESTS = {None: 0, "save": SAVE, "stop": STOP}
Metrics = Mapping[str, Any]
Ask = Callable[[Metrics], str | None]


class Border:
    """What signals and `asks` want of a run. Only the leading process asks; `failure`: what went wrong there."""

    def __init__(self, exchange: Exchange, asks: Sequence[Ask] = ()):
        self.exchange, self.asks = exchange, tuple(asks) if exchange.leads else ()
        self.request, self.failure = 0, None

    def cross(self, interrupts: Interrupts, metrics: Metrics) -> None:
        """Ask, once for each step. Sets `request`, on all processes."""
        asked = max((self._asked(ask, metrics) for ask in self.asks), default=0)
        self.request = self.exchange.agree(max(asked, _signal(interrupts)))

    def look(self, interrupts: Interrupts) -> None:
        """Ask for signals only, where no step has just ended."""
        self.request = max(self.request, self.exchange.agree(_signal(interrupts)))

    def _asked(self, ask: Ask, metrics: Metrics) -> int:
        """A failing `ask` stops the run, so that it is saved before the error is raised."""
        try:
            answer = ask(metrics)
            if not isinstance(answer, str | None) or answer not in REQUESTS:
                raise UserError(f'on_step returned {brief(answer)}; wanted "stop", "save" or None')
        except Exception as error:
            self.failure = error
            return STOP
        return REQUESTS[answer]

    @property
    def signum(self) -> int:
        """The signal that stops the run, whichever process received it, or 0."""
        return max(0, self.request - SIGNAL)

    @property
    def stops(self) -> bool:
        return self.request >= STOP

    @property
    def saves(self) -> bool:
        return self.request == SAVE


def _signal(interrupts: Interrupts) -> int:
    return SIGNAL + interrupts.signum if interrupts.signum else 0
