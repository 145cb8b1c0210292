"""What the GPU knows of each step, read a few steps later so that nobody waits for it; and steps that went wrong."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import wgpu

from lorawgpu.engine.engine import Engine
from lorawgpu.ops.cross_entropy import loss_value
from lorawgpu.ops.step_state import StepState, unpack_state

DEPTH = 4  # steps under way before the oldest is waited for: it also bounds what the driver has to queue


@dataclass(frozen=True)
class Report:
    """Step `step` as the GPU saw it: whether it was bad, what its objective summed, its gradient's norm before
    clipping."""

    step: int
    state: StepState
    sums: dict[str, float]
    grad_norm: float


class LateReader:
    """Copies the reports of a step into a small ring of mapped buffers; reading one back stalls nothing."""

    def __init__(self, engine: Engine, depth: int = DEPTH):
        self.engine = engine
        self._sources = (engine.state, engine.norm, *engine.totals.values())
        size = -(-sum(t.nbytes for t in self._sources) // 8) * 8  # what is mapped comes in eights
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        self._free = deque(engine.device.buffer(size, "late report", "step", usage) for _ in range(depth))
        self._waiting = deque()

    def push(self, step: int) -> list[Report]:
        """Order the report of the step just submitted. Returns the oldest one when the ring is full, else nothing."""
        due = [] if self._free else [self._read()]
        buffer, device, offset = self._free.popleft(), self.engine.device, 0
        encoder = device.wgpu.create_command_encoder()
        for tensor in self._sources:
            encoder.copy_buffer_to_buffer(tensor.buffer, tensor.offset, buffer, offset, tensor.nbytes)
            offset += tensor.nbytes
        device.queue.submit([encoder.finish()])
        self._waiting.append((step, buffer, buffer.map_async("READ_NOSYNC")))
        return due

    def drain(self) -> list[Report]:
        """All reports not handed out yet; waits for the GPU."""
        return [self._read() for _ in range(len(self._waiting))]

    def _read(self) -> Report:
        step, buffer, mapped = self._waiting.popleft()
        mapped.sync_wait()
        words = np.frombuffer(buffer.read_mapped(), np.uint32)
        buffer.unmap()
        self._free.append(buffer)
        state, norm, *totals = np.split(words, np.cumsum([t.size for t in self._sources]))
        sums = {name: loss_value(total) for name, total in zip(self.engine.totals, totals, strict=False)}
        return Report(step, unpack_state(state), sums, float(norm.view(np.float32)[0]))


def fault(engine: Engine, state: StepState) -> str:
    """The name of the first watched tensor of the latest bad step that was not finite."""
    return "a tensor that is not watched" if state.record is None else engine.watch.names[state.record]


def bad_tensors(engine: Engine) -> list[str]:
    """Adapter tensors and gradients of the latest step that are not finite now: for the last message of a run."""
    return [
        f"{which} of {name}" if which == "grads" else name
        for which in ("params", "grads")
        for name, tensor in engine.tensors(which).items()
        if not np.isfinite(tensor).all()
    ]
