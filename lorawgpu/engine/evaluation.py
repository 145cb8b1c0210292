"""The loss on held-out data."""

import math
from dataclasses import dataclass

from lorawgpu.data.batching import SampleSet, sequential
from lorawgpu.engine.engine import Engine
from lorawgpu.engine.exchange import share
from lorawgpu.ops.cross_entropy import fixed_point


@dataclass(frozen=True)
class Evaluation:
    """`loss`: mean cross-entropy over all `tokens` target tokens of the data; NaN if any loss was not finite."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate_source(engine: Engine, source: SampleSet, adapter: bool = True) -> Evaluation:
    """Evaluate every sample of `source` once, in order, as many per micro-batch as fit.

    Without `adapter`, evaluate the base model. Each process of the engine's exchange computes its share. ValueError if
    no sample has a target.
    """
    tokens = 0
    engine.begin()
    for _, batch in share(engine.exchange, sequential(source, engine.options.capacity)):
        engine.evaluate(batch, adapter)
        tokens += engine.objective.divisor(batch)
    sums = [fixed_point(engine.device.read(total)) for total in engine.totals.values()]
    parts = engine.exchange.gather((int(engine.steps_state().bad), tokens, *sums))
    bad, tokens, *sums = map(sum, zip(*parts, strict=True))
    if not tokens:
        raise ValueError("evaluate_source: no sample has a target")
    values = {name: value / 2**32 for name, value in zip(engine.totals, sums, strict=True)}
    loss = engine.objective.metrics(values, tokens)["loss"]
    return Evaluation(math.nan if bad else loss, tokens)
