"""The loss on held-out data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lorawgpu.data.batching import MicroBatch, SampleSet, sequential
from lorawgpu.engine.engine import Engine
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


class Watch:
    """Turns submitted operations into computed tokens: before it calls `advance` with their number, it waits for the
    device, whenever a full submit's worth of work is queued."""

    def __init__(self, engine: Engine, advance: Callable[[int], None]):
        self.engine, self.advance = engine, advance
        self.queued = self.tokens = self.rate = 0.0

    def start(self, batch: MicroBatch, adapter: bool) -> "Watch":
        """Expect the submits of `batch`, of which this process computes one in `exchange.size`."""
        tokens, flops = batch.tokens * self.engine.exchange.size, self.engine.flops(batch, "eval", adapter)
        self.rate = tokens / flops if flops else 0.0
        self.tokens += 0.0 if flops else tokens
        return self

    def __call__(self, flops: float) -> None:
        self.queued += flops
        self.tokens += flops * self.rate
        if self.queued >= self.engine.options.flops_per_submit:
            self.engine.device.wait()
            whole = int(self.tokens)
            self.queued, self.tokens = 0.0, self.tokens - whole
            self.advance(whole)


def evaluate_source(
    engine: Engine, source: SampleSet, adapter: bool = True, advance: Callable[[int], None] | None = None
) -> Evaluation:
    """Evaluate every sample of `source` once, in order, as many per micro-batch as fit.

    Without `adapter`, evaluate the base model. Each process of the engine's exchange computes its share. advance:
    called with a number of tokens when they are computed; what it raises ends the evaluation. ValueError if no sample
    has a target.
    """
    tokens, watch = 0, Watch(engine, advance) if advance else None
    engine.begin()
    for _, batch in engine.share(sequential(source, engine.options.capacity)):
        engine.evaluate(batch, adapter, watch and watch.start(batch, adapter))
        tokens += engine.objective.divisor(batch)
    sums = [fixed_point(engine.device.read(total)) for total in engine.totals.values()]
    parts = engine.exchange.gather((int(engine.steps_state().bad), tokens, *sums))
    bad, tokens, *sums = map(sum, zip(*parts, strict=True))
    if not tokens:
        raise ValueError("evaluate_source: no sample has a target")
    values = {name: value / 2**32 for name, value in zip(engine.totals, sums, strict=True)}
    loss = engine.objective.metrics(values, tokens)["loss"]
    return Evaluation(math.nan if bad else loss, tokens)
