"""The loss on data that is not trained on."""

import math
from dataclasses import dataclass

from lorawgpu.data.batching import SampleSet, sequential
from lorawgpu.engine.engine import Engine


@dataclass(frozen=True)
class Evaluation:
    """`loss`: mean cross-entropy over all target tokens of the data, `tokens` of them; NaN when it is not finite."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_source(engine: Engine, source: SampleSet) -> Evaluation:
    """Run every sample of `source` once, in order, as many at a time as fit. ValueError when nothing has a target."""
    tokens = 0
    engine.begin()
    for batch in sequential(source, engine.options.capacity):
        engine.evaluate(batch)
        tokens += batch.targets
    if not tokens:
        raise ValueError("evaluate_source: no sample has a target")
    loss = engine.loss_sum() / tokens
    return Evaluation(math.nan if engine.steps_state().bad else loss, tokens)
