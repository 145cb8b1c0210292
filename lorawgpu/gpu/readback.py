"""Read tensors back a few submits late, without waiting for the GPU."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import wgpu

from lorawgpu.gpu.device import Device
from lorawgpu.gpu.tensor import Tensor

MAP_ALIGN = 8  # bytes; WebGPU maps multiples of this


class Readback:
    """Up to `depth` copies of `tensors` (4-byte elements) in flight, each in its own mapped buffer.

    `push` queues a copy after everything submitted so far; `pop` returns the oldest copy.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor], depth: int, label: str):
        self.device, self.tensors = device, tensors
        size = -(-sum(t.nbytes for t in tensors) // MAP_ALIGN) * MAP_ALIGN
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        self._free = deque(device.buffer(size, label, "step", usage) for _ in range(depth))
        self._waiting = deque()

    def __len__(self) -> int:
        """Copies in flight."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return not self._free

    def push(self) -> None:
        """Queue a copy. IndexError if `depth` copies are in flight."""
        buffer, offset = self._free.popleft(), 0
        encoder = self.device.wgpu.create_command_encoder()
        for tensor in self.tensors:
            encoder.copy_buffer_to_buffer(tensor.buffer, tensor.offset, buffer, offset, tensor.nbytes)
            offset += tensor.nbytes
        self.device.submit(encoder.finish())
        self._waiting.append((buffer, buffer.map_async("READ_NOSYNC")))

    def pop(self) -> list[np.ndarray]:
        """The oldest copy: uint32 words for each tensor. Waits until it has arrived."""
        buffer, mapped = self._waiting.popleft()
        mapped.sync_wait()
        words = np.frombuffer(buffer.read_mapped(), np.uint32)
        buffer.unmap()
        self._free.append(buffer)
        return np.split(words, np.cumsum([t.size for t in self.tensors]))[: len(self.tensors)]
