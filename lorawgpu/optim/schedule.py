"""The learning rate of each optimizer step, in float64 on the host.

Steps count from 0 and the formulas are those of transformers' `get_scheduler`: the first warmup step has rate 0, step
`warmup_steps` has the peak rate, and the last step of a decay is just above its end. `rex` is defined in
https://arxiv.org/abs/2107.04197, `cosine_constant_lr_ratio` in https://arxiv.org/abs/2308.04014.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Shape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """A linear warmup from 0 to `peak`, then what `kind` (a key of `SCHEDULES`) makes of the other steps."""

    kind: str
    peak: float
    total_steps: int
    warmup_steps: int = 0
    options: dict = field(default_factory=dict)  # keywords of the kind's function

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0. A decay stays at its end after `total_steps`."""
        return SCHEDULES[self.kind](self, min(step, self.total_steps), **self.options)

    def warmup(self, step: int) -> float:
        """The fraction of the peak in a linear warmup."""
        return step / max(1, self.warmup_steps)

    def progress(self, step: int) -> float:
        """How much of the decay is over, from 0 to 1; negative during the warmup."""
        return (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)


def _constant(s: Schedule, step: int) -> float:
    return s.peak * min(1.0, s.warmup(step)) if s.warmup_steps else s.peak


def _linear(s: Schedule, step: int) -> float:
    return s.peak * (s.warmup(step) if step < s.warmup_steps else max(0.0, 1 - s.progress(step)))


def _cosine(
    s: Schedule,
    step: int,
    num_cycles: float = 0.5,
    cosine_min_lr_ratio: float = 0.0,
    cosine_constant_lr_ratio: float | None = None,
) -> float:
    """Down to `cosine_min_lr_ratio` of the peak, after `cosine_constant_lr_ratio` of all steps, then constant."""
    if step < s.warmup_steps:
        return s.peak * s.warmup(step)
    end = s.total_steps if cosine_constant_lr_ratio is None else int(s.total_steps * cosine_constant_lr_ratio)
    progress = (min(step, end) - s.warmup_steps) / max(1, end - s.warmup_steps)
    return s.peak * _between(cosine_min_lr_ratio, _wave(progress, num_cycles))


def _cosine_with_min_lr(
    s: Schedule, step: int, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float = 0.0
) -> float:
    return _cosine(s, step, num_cycles, min_lr_rate if min_lr is None else min_lr / s.peak)


def _cosine_warmup_with_min_lr(
    s: Schedule,
    step: int,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float = 0.0,
    warmup_lr_rate: float | None = None,
) -> float:
    """One step ahead of `cosine_with_min_lr`: the first step of the warmup is above 0, the last step is the minimum."""
    if step < s.warmup_steps:
        if warmup_lr_rate is None:
            return s.peak * s.warmup(step + 1)
        return s.peak * (warmup_lr_rate + (1 - warmup_lr_rate) * step / max(1, s.warmup_steps - 1))
    rate = min_lr_rate if min_lr is None else min_lr / s.peak
    return s.peak * _between(rate, _wave(s.progress(step + 1), num_cycles))


def _cosine_with_restarts(s: Schedule, step: int, num_cycles: int = 1) -> float:
    if step < s.warmup_steps:
        return s.peak * s.warmup(step)
    progress = s.progress(step)
    return 0.0 if progress >= 1 else s.peak * _wave(num_cycles * progress % 1.0)


def _polynomial(s: Schedule, step: int, lr_end: float = 1e-7, power: float = 1.0) -> float:
    if step < s.warmup_steps:
        return s.peak * s.warmup(step)
    return (s.peak - lr_end) * max(0.0, 1 - s.progress(step)) ** power + lr_end


def _inverse_sqrt(s: Schedule, step: int, timescale: float | None = None) -> float:
    if step < s.warmup_steps:
        return s.peak * s.warmup(step)
    timescale = timescale or s.warmup_steps or 10_000
    return s.peak / math.sqrt((step - s.warmup_steps + timescale) / timescale)


def _warmup_stable_decay(
    s: Schedule,
    step: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: Shape = "linear",
    decay_type: Shape = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Without `num_stable_steps`, the decay ends with the run. The warmup starts at `min_lr_ratio` of the peak, and the
    decay ends there."""
    stable = s.total_steps - s.warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < s.warmup_steps:
        part = s.warmup(step)
        rise = {"linear": part, "cosine": 0.5 * (1 - math.cos(math.pi * part)), "1-sqrt": 1 - math.sqrt(1 - part)}
        return s.peak * _between(min_lr_ratio, rise[warmup_type])
    past = step - s.warmup_steps - stable
    if past < 0:
        return s.peak
    if past >= num_decay_steps:
        return s.peak * min_lr_ratio
    part = past / max(1, num_decay_steps)
    fall = {"linear": 1 - part, "cosine": _wave(part, num_cycles), "1-sqrt": 1 - math.sqrt(part)}
    return s.peak * _between(min_lr_ratio, fall[decay_type])


def _rex(s: Schedule, step: int, rex_beta: float = 0.5, cosine_min_lr_ratio: float = 0.0) -> float:
    """z / (1 - beta + beta z), where z is the part of the decay that is left; beta is 1/2 in the paper."""
    if step < s.warmup_steps:
        return s.peak * s.warmup(step)
    left = 1 - s.progress(step)
    return s.peak * _between(cosine_min_lr_ratio, left / (1 - rex_beta + rex_beta * left) if left > 0 else 0.0)


def _wave(progress: float, num_cycles: float = 0.5) -> float:
    """From 1 to 0 along a cosine; half a cycle ends at 0."""
    return 0.5 * (1 + math.cos(math.pi * 2 * num_cycles * progress))


def _between(low: float, part: float) -> float:
    return max(0.0, part * (1 - low) + low)


SCHEDULES: dict[str, Callable] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
    "rex": _rex,
}


def options_of(kind: str) -> dict[str, inspect.Parameter]:
    """The options of a schedule, by name."""
    return dict(list(inspect.signature(SCHEDULES[kind]).parameters.items())[2:])


def schedule_of(config, total_steps: int) -> Schedule:
    """The schedule of a TrainConfig. A warmup ratio is rounded up to whole steps, as in transformers."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    return Schedule(config.lr_scheduler, config.learning_rate, total_steps, warmup, config.lr_options)
