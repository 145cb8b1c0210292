"""A ring of mapped buffers through which large tensors leave the GPU piece by piece, while it goes on computing.

wgpu-py's own mapping polls in a thread that waits for everything submitted so far, and other threads cannot submit
meanwhile. So these buffers are mapped by wgpu-native, and polled without blocking.
"""

import time
from collections import deque

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from lorawgpu.gpu.device import Device
from lorawgpu.gpu.readback import MAP_ALIGN
from lorawgpu.gpu.tensor import Tensor

POLL = 1e-4  # seconds between two polls


class StagingRing:
    """Up to `depth` pieces of at most `nbytes` bytes in flight. `push` queues a copy; `pop` returns the oldest one."""

    def __init__(self, device: Device, nbytes: int, depth: int, label: str):
        self.device, self.nbytes = device, -(-nbytes // MAP_ALIGN) * MAP_ALIGN
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        self._free = deque(device.buffer(self.nbytes, label, "exchange", usage) for _ in range(depth))
        self._waiting = deque()

    def __len__(self) -> int:
        """Pieces in flight."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return not self._free

    def push(self, *tensors: Tensor) -> None:
        """Queue a copy of `tensors` (4-byte elements) after everything submitted so far. IndexError if it is full."""
        buffer, offset = self._free.popleft(), 0
        encoder = self.device.wgpu.create_command_encoder()
        for tensor in tensors:
            encoder.copy_buffer_to_buffer(tensor.buffer, tensor.offset, buffer, offset, tensor.nbytes)
            offset += tensor.nbytes
        self.device.submit(encoder.finish())
        size = -(-offset // MAP_ALIGN) * MAP_ALIGN
        self._waiting.append((buffer, _Mapping(buffer, size), [t.size for t in tensors]))

    def ready(self) -> bool:
        """Whether the oldest piece has arrived."""
        self.device.poll()
        return bool(self._waiting) and self._waiting[0][1].done

    def pop(self) -> list[np.ndarray]:
        """The oldest piece: uint32 words for each of its tensors. Waits until it has arrived."""
        buffer, mapping, sizes = self._waiting.popleft()
        while not mapping.done:
            self.device.poll()
            if not mapping.done:
                time.sleep(POLL)
        words = mapping.read()
        self._free.append(buffer)
        return np.split(words, np.cumsum(sizes))[: len(sizes)]


class _Mapping:
    """A buffer that is being mapped for reading. `done`: whether it has been, or failed to."""

    def __init__(self, buffer, nbytes: int):
        self.done, self._error = False, ""
        self._handle, self._nbytes = buffer._internal, nbytes
        self._callback = ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", self._finish)
        info = ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode, info.callback = lib.WGPUCallbackMode_AllowProcessEvents, self._callback
        lib.wgpuBufferMapAsync(self._handle, lib.WGPUMapMode_Read, 0, nbytes, info[0])

    def _finish(self, status, message, *_):
        if status != lib.WGPUMapAsyncStatus_Success:
            text = ffi.unpack(message.data, message.length).decode(errors="replace") if message.length else ""
            self._error = f"could not map a buffer: {text or status}"
        self.done = True

    def read(self) -> np.ndarray:
        """A copy of its words; unmaps it. GPUError if it could not be mapped: most likely the device was lost."""
        if self._error:
            raise wgpu.GPUError(self._error)
        address = lib.wgpuBufferGetConstMappedRange(self._handle, 0, self._nbytes)
        words = np.frombuffer(ffi.buffer(address, self._nbytes), np.uint32).copy()
        lib.wgpuBufferUnmap(self._handle)
        return words
