"""Reports of steps, read back a few steps late so that nothing waits for the GPU; and what was not finite."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from lorawgpu.engine.engine import Engine
from lorawgpu.gpu import Readback
from lorawgpu.ops.cross_entropy import loss_value
from lorawgpu.ops.step_state import StepState, unpack_state

DEPTH = 4  # steps in flight before waiting for the oldest; this also bounds the driver's queue


@dataclass(frozen=True)
class Report:
    """Results of step `step`: whether it was bad, the sums of its objective, and the gradient norm before clipping."""

    step: int
    state: StepState
    sums: dict[str, float]
    grad_norm: float


class LateReader:
    """Reads the report of each step `depth` steps later."""

    def __init__(self, engine: Engine, depth: int = DEPTH):
        self._ring = Readback(engine.device, (engine.state, engine.norm, *engine.totals.values()), depth, "late report")
        self._steps, self._names = deque(), tuple(engine.totals)

    def push(self, step: int) -> list[Report]:
        """Request the report of the step just submitted. Returns the oldest one if the ring is full."""
        due = [self._read()] if self._ring.full else []
        self._ring.push()
        self._steps.append(step)
        return due

    def drain(self) -> list[Report]:
        """All outstanding reports; waits for the GPU."""
        return [self._read() for _ in range(len(self._steps))]

    def _read(self) -> Report:
        state, norm, *totals = self._ring.pop()
        sums = {name: loss_value(total) for name, total in zip(self._names, totals, strict=True)}
        return Report(self._steps.popleft(), unpack_state(state), sums, float(norm.view(np.float32)[0]))


def fault(engine: Engine, state: StepState) -> str:
    """The name of the first checked tensor that was not finite in the latest bad step."""
    return "a tensor that is not checked" if state.record is None else engine.non_finite.names[state.record]


def bad_tensors(engine: Engine) -> list[str]:
    """Adapter tensors and gradients of the latest step that are not finite, for the last message of a run."""
    return [
        f"{which} of {name}" if which == "grads" else name
        for which in ("params", "grads")
        for name, tensor in engine.tensors(which).items()
        if not np.isfinite(tensor).all()
    ]
