"""What an evaluation during training measures, how it shows how far it is, and how a signal ends it."""

from collections.abc import Callable
from typing import NamedTuple

from lorawgpu.engine.engine import Engine
from lorawgpu.engine.evaluation import Evaluation, evaluate_source
from lorawgpu.train.interrupt import Interrupts
from lorawgpu.train.metrics import EVALUATING, Progress
from lorawgpu.train.samples import Samples
from lorawgpu.train.setup import Run


class Stopped(Exception):
    """A signal came during an evaluation, which was given up."""


class Measured(NamedTuple):
    """Answers to the sample prompts, and the loss on held-out data; None where there is nothing to measure."""

    samples: list[dict[str, str]] | None
    held_out: Evaluation | None


class Evaluator:
    def __init__(self, run: Run, engine: Engine, samples: Samples, progress: Progress, interrupts: Interrupts):
        self.run, self.engine, self.samples = run, engine, samples
        self.progress, self.interrupts = progress, interrupts

    def measure(self, base: bool = False) -> Measured:
        """Evaluate the current adapter, or the base model. Raises Stopped after a signal, and has changed nothing."""
        of = " of the base model" if base else ""
        answers, held_out = None, self.run.data.validation
        self.engine.settle()  # all processes together: only one of them answers
        with self.progress.paused(EVALUATING), self.engine.exchange.working():
            if self.samples.prompts:
                ask = self.samples.base_answers if base else self.samples.answers
                answers = ask(self._watch(f"sample answers{of}", len(self.samples.prompts)))
            if held_out is None:
                return Measured(answers, None)
            watch = self._watch(f"held-out loss{of}", int(held_out.lengths.sum()), " tokens")
            return Measured(answers, evaluate_source(self.engine, held_out, not base, _sum(watch)))

    def _watch(self, what: str, total: int, unit: str = "") -> Callable[[int], None]:
        """A function of how much is done, of `total`."""

        def watch(done: int) -> None:
            # If several processes train together, all of them end the evaluation, and then the run.
            if self.interrupts.signum and self.engine.exchange.size == 1:
                raise Stopped
            self.progress.doing(f"{what}: {done:,} of {total:,}{unit}")

        return watch


def _sum(watch: Callable[[int], None]) -> Callable[[int], None]:
    """`watch` for increments."""
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        watch(done)

    return advance
