"""The learning rate of each optimizer step, in float64 on the host.

Steps count from 0 and the formulas are those of transformers' `get_scheduler`: the first warmup step has rate 0, step
`warmup_steps` has the peak rate, and the last step of a decay is just above 0.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warmup from 0 to `peak`, then constant, or a linear or half-cosine decay to 0 at `total_steps`."""

    kind: str  # "constant" | "linear" | "cosine"
    peak: float
    total_steps: int
    warmup_steps: int = 0

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0. A decay stays at 0 after `total_steps`."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if progress >= 1:
            return 0.0
        return self.peak * (1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def schedule_of(config, total_steps: int) -> Schedule:
    """The schedule of a TrainConfig. A warmup ratio is rounded up to whole steps, as in transformers."""
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    return Schedule(config.lr_scheduler, config.learning_rate, total_steps, warmup)
