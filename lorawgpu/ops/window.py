"""First and last things of an optimizer step: clear what accumulates, count bad steps. Words: shaders/window.wgsl."""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import Device, Tensor
from lorawgpu.ops.checks import STATE_WORDS, expect, expect_state

NO_RECORD = 0xFFFFFFFF


@dataclass(frozen=True)
class State:
    """What the GPU knows of non-finite steps; `record` is the id of the first bad record of the latest bad window."""

    bad: bool
    bad_run: int
    bad_total: int
    record: int | None
    windows: int


def state_buffer(device: Device) -> Tensor:
    return device.tensor((STATE_WORDS,), "u32", "state", "step")


def unpack_state(words: np.ndarray) -> State:
    """The words of a state buffer, read between windows."""
    bad, _, run, total, record, windows = map(int, words[:6])
    return State(bool(bad), run, total, record if total and record != NO_RECORD else None, windows)


def pack_state(state: State) -> np.ndarray:
    """Words that continue from `state`: a resumed run."""
    words = [
        state.bad,
        NO_RECORD,
        state.bad_run,
        state.bad_total,
        NO_RECORD if state.record is None else state.record,
        state.windows,
    ]
    return np.array(words + [0] * (STATE_WORDS - len(words)), np.uint32)


def begin_window(plan, state, total):
    """Clear this window's bad flag and the loss total u32 [2] (`ops.cross_entropy.loss_sum`); gradients: plan.clear."""
    expect("total", total, (2,), "u32")
    expect_state(state)
    plan.record("window", "begin", (1,), total=total, state=state)


def end_window(plan, state):
    """Count this window, and whether it was bad; after the optimizer."""
    expect_state(state)
    plan.record("window", "end", (1,), state=state)
