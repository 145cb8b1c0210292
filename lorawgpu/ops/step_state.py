"""Begin and end an optimizer step: clear the loss and the bad flag, count bad steps. Words: shaders/step_state.wgsl."""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import Device, Tensor
from lorawgpu.ops.checks import STATE_WORDS, expect, expect_state

NO_RECORD = 0xFFFFFFFF


@dataclass(frozen=True)
class StepState:
    """The GPU's account of non-finite steps. `record`: lowest id of a bad record in the latest bad step."""

    bad: bool
    bad_run: int
    bad_total: int
    record: int | None
    steps: int


def state_buffer(device: Device) -> Tensor:
    return device.tensor((STATE_WORDS,), "u32", "state", "step")


def unpack_state(words: np.ndarray) -> StepState:
    """Unpack the words of a state buffer that was read between steps."""
    bad, _, run, total, record, steps = map(int, words[:6])
    return StepState(bool(bad), run, total, record if total and record != NO_RECORD else None, steps)


def pack_state(state: StepState) -> np.ndarray:
    """The words with which a resumed run continues from `state`."""
    words = [
        state.bad,
        NO_RECORD,
        state.bad_run,
        state.bad_total,
        NO_RECORD if state.record is None else state.record,
        state.steps,
    ]
    return np.array(words + [0] * (STATE_WORDS - len(words)), np.uint32)


def begin_step(plan, state, total):
    """Clear the step's bad flag and the loss total u32 [2] (`ops.cross_entropy.loss_sum`), but not the gradients."""
    expect("total", total, (2,), "u32")
    expect_state(state)
    plan.record("step_state", "begin", (1,), total=total, state=state)


def end_step(plan, state):
    """Count this step, and whether it was bad. Record it after the optimizer."""
    expect_state(state)
    plan.record("step_state", "end", (1,), state=state)
