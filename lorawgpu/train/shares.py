"""How many micro-batches of a step each process computes, and what their exchange costs: measured, before step 1."""

import time
from dataclasses import replace

import numpy as np

from lorawgpu.engine.engine import Engine
from lorawgpu.train.checkpoint import Snapshot
from lorawgpu.train.setup import Run


def balanced(run: Run, engine: Engine, snapshot: Snapshot | None) -> Run:
    """The run with shares that suit the devices, for `micro_batches_per_rank: auto`; `engine` takes them too.

    A resumed run keeps the shares of its checkpoint, if there are as many processes.
    """
    saved = snapshot.state["config"].get("micro_batches_per_rank") if snapshot else None
    if not isinstance(saved, list) or len(saved) != engine.exchange.size or sum(saved) != sum(run.shares):
        alone = engine.exchange.size == 1
        seconds = [1.0] if alone else engine.exchange.gather(seconds_per_micro_batch(run, engine))
        saved = shares_for(seconds, sum(run.shares))
    config = run.config.model_copy(update={"micro_batches_per_rank": saved})
    engine.options = replace(engine.options, shares=tuple(saved))
    return replace(run, config=config, shares=tuple(saved))


def shares_for(seconds: list[float], total: int) -> list[int]:
    """`total` micro-batches, at least one for each rank, so that the slowest rank ends as early as possible.

    seconds: what a micro-batch takes on each rank. ValueError if there are fewer micro-batches than ranks.
    """
    if total < len(seconds):
        raise ValueError(f"{total} micro-batches for {len(seconds)} ranks")
    shares = [1] * len(seconds)
    for _ in range(total - len(seconds)):  # each goes to the rank that ends first with it
        ends = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[int(np.argmin(ends))] += 1
    return shares


def seconds_per_micro_batch(run: Run, engine: Engine) -> float:
    """Forward and backward of the run's first micro-batch with a target, the second time."""
    step = next(run.batches.step_batches())
    batch = next((b for b in step.micro_batches if b.targets), step.micro_batches[0])
    for _ in range(2):
        engine.begin()
        start = time.perf_counter()
        engine.accumulate(batch)
        engine.device.wait()
    return time.perf_counter() - start


def exchange_seconds(engine: Engine) -> float:
    """What the exchange of a step takes by itself, on the slowest rank. The adapter stays as it is."""
    for _ in range(2):  # the first time, buffers are allocated
        engine.begin()
        engine.exchange.gather(None)
        start = time.perf_counter()
        engine.exchange_once()
        seconds = time.perf_counter() - start
    return max(engine.exchange.gather(seconds))
