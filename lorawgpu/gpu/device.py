"""Choose an adapter, request exactly the limits that the kernels need, and allocate buffers while counting bytes."""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import wgpu

from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu.adapters import choose_adapter, list_adapters
from lorawgpu.gpu.capabilities import Capabilities, MatrixCores
from lorawgpu.gpu.matrix_cores import FEATURES, found_cores, mode_of, offered
from lorawgpu.gpu.tensor import DTYPES, Tensor

# WebGPU's guaranteed limits; every kernel stays within them. All are named, because wgpu-py requests the adapter's
# maximum for any limit that is left out.
DEFAULT_LIMITS = {
    "max-bind-groups": 4,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-workgroups-per-dimension": 65535,
    "max-storage-buffers-per-shader-stage": 8,
    "max-uniform-buffers-per-shader-stage": 12,
    "max-uniform-buffer-binding-size": 65536,
    "min-storage-buffer-offset-alignment": 256,
    "min-uniform-buffer-offset-alignment": 256,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-buffer-size": 256 << 20,
}
# These two follow the adapter: with larger bindings, large matrices are cut into fewer parts.
ADAPTER_LIMITS = ("max-storage-buffer-binding-size", "max-buffer-size")
OPTIONAL_FEATURES = ("timestamp-query",)
REMEDIES = {  # what to do about a buffer that is too large, by its kind
    **dict.fromkeys(("activations", "step"), "lower sequence_len or micro_batch_size"),
    **dict.fromkeys(("adapter", "optimizer"), "lower lora_r, or name fewer lora_target_modules"),
    "kv cache": "shorten the context",
}
BINDING_CEILING = (2 << 30) - 4  # naga computes byte offsets in u32, and some drivers misbehave beyond this

STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
GPUError = wgpu.GPUError


@contextmanager
def device_errors():
    """Turn wgpu's errors (lost device, out of memory, validation) inside the block into a DeviceError."""
    try:
        yield
    except wgpu.GPUOutOfMemoryError as error:
        raise DeviceError(f"out of GPU memory: {error}") from error
    except wgpu.GPUError as error:
        lost = "is lost" in str(error)
        raise DeviceError(f"the device was lost: {error}" if lost else f"the device failed: {error}") from error


@dataclass
class Memory:
    """GPU bytes allocated so far, by kind. Nothing is freed during a run."""

    budget: int | None = None
    held: dict = field(default_factory=dict)

    def check(self, nbytes: int, label: str):
        """DeviceError if `nbytes` more would exceed the budget."""
        if self.budget is not None and self.total + nbytes > self.budget:
            raise DeviceError(
                f"out of GPU memory: {label} needs {nbytes:,} bytes, {self.total:,} of {self.budget:,} are in use"
            )

    def add(self, kind: str, nbytes: int):
        self.held[kind] = self.held.get(kind, 0) + int(nbytes)  # a shape may hold NumPy integers, which JSON refuses

    @property
    def total(self) -> int:
        return sum(self.held.values())


def lanes_of(info: dict) -> int:
    """Lanes of a subgroup, or 0 if they vary or the driver does not say."""
    least, most = (next((v for k, v in info.items() if k.endswith(f"group_{end}_size")), 0) for end in ("min", "max"))
    return least if least == most else 0


class Device:
    """A wgpu device with its limits and memory account; uploads and downloads tensors."""

    dry = False  # True for a DryDevice, which allocates nothing
    matrix: MatrixCores | None = None  # the matrix cores that kernels use
    matrix_note = "not asked for"  # why there are none, or what they are

    def __init__(self, adapter, reason: str, limits: dict, budget: int | None = None, required: tuple = ()):
        self.adapter, self.reason, self.limits = adapter, reason, limits
        self.info = adapter.info
        self.features = [f for f in OPTIONAL_FEATURES if f in adapter.features] + list(required)
        self.memory = Memory(budget)
        self._open()
        self._fence = self.buffer(16, "fence", "plan")

    def _open(self):
        try:
            self.wgpu = self.adapter.request_device_sync(required_features=self.features, required_limits=self.limits)
        except Exception as e:
            raise DeviceError(f"{self.name}: the driver refused the device: {e}") from e
        self.queue = self.wgpu.queue

    @property
    def name(self) -> str:
        return f"{self.info['device']} ({self.info['adapter_type']}, {self.info['backend_type']})"

    @property
    def driver(self) -> str:
        return self.info["description"]

    @property
    def is_cpu(self) -> bool:
        return self.info["adapter_type"] == "CPU"

    @property
    def capabilities(self) -> Capabilities:
        memory = self.limits["max-compute-workgroup-storage-size"]
        kind, vendor = self.info["adapter_type"], self.info.get("vendor_id", 0)
        return Capabilities(
            self.is_cpu, memory, frozenset(self.features), kind, vendor, lanes_of(self.info), self.matrix
        )

    @property
    def max_binding(self) -> int:
        """Most bytes in one binding, a multiple of 256."""
        return min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"]) // 256 * 256

    def buffer(self, nbytes: int, label: str, kind: str, usage=STORAGE):
        """A zeroed buffer. DeviceError, naming `label`, if the budget or GPU memory is exhausted."""
        nbytes = max(nbytes, 16)
        if nbytes > self.limits["max-buffer-size"]:
            raise DeviceError(
                f"{label} needs a buffer of {nbytes:,} bytes; {self.name} allows "
                f"{self.limits['max-buffer-size']:,}: {REMEDIES.get(kind, 'use a smaller model or another device')}"
            )
        self.memory.check(nbytes, label)
        buffer = self._create(nbytes, label, usage)
        self.memory.add(kind, nbytes)
        return buffer

    def _create(self, nbytes: int, label: str, usage):
        try:
            return self.wgpu.create_buffer(label=label, size=nbytes, usage=usage)
        except Exception as e:
            raise DeviceError(f"out of GPU memory: {label} needs {nbytes:,} bytes: {e}") from e

    def tensor(self, shape, dtype="f32", label="", kind="other") -> Tensor:
        """A zeroed tensor in a buffer of its own."""
        t = Tensor(None, tuple(shape), dtype, 0, label)
        return Tensor(self.buffer(t.nbytes, label, kind), t.shape, dtype, 0, label)

    def uniform(self, words: int, label: str, kind: str) -> Tensor:
        """A zeroed uniform of `words` u32 words, in a buffer of its own."""
        return Tensor(self.buffer(4 * words, label, kind, UNIFORM), (words,), "u32", 0, label)

    def upload(self, array: np.ndarray, dtype=None, label="", kind="other") -> Tensor:
        """A new tensor holding `array`. The dtype is the array's unless given (bf16 comes as uint16)."""
        dtype = dtype or next(k for k, v in DTYPES.items() if np.dtype(v) == array.dtype)
        t = self.tensor(array.shape, dtype, label, kind)
        self.write(t, array)
        return t

    def write(self, tensor: Tensor, array: np.ndarray):
        """Copy `array` (same element count and item size) into `tensor`."""
        if np.size(array) != tensor.size:
            raise ValueError(f"{tensor.label}: cannot write an array of shape {np.shape(array)} into {tensor.shape}")
        self.write_at(tensor, 0, array)

    def write_at(self, tensor: Tensor, start: int, array: np.ndarray):
        """Copy `array` (same item size) into `tensor` from element `start` on, at a multiple of 4 bytes."""
        array = np.ascontiguousarray(array)
        want = np.dtype(DTYPES[tensor.dtype])
        if array.dtype.itemsize != want.itemsize or not 0 <= start <= tensor.size - array.size:
            raise ValueError(
                f"{tensor.label}: cannot write {array.dtype}{array.shape} into {tensor.dtype}{tensor.shape} at {start}"
            )
        data = array.reshape(-1).view(np.uint8)
        if data.size % 4:
            data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
        self.queue.write_buffer(tensor.buffer, tensor.offset + start * want.itemsize, data)

    def submit(self, commands):
        """Submit the commands of `Plan.encode`. Does not wait."""
        self.queue.submit([commands])

    def read(self, tensor: Tensor) -> np.ndarray:
        """A copy of `tensor` on the host. Waits for all work submitted before."""
        raw = self.queue.read_buffer(tensor.buffer, tensor.offset, tensor.nbytes)
        dtype = DTYPES[tensor.dtype]
        return np.frombuffer(raw, dtype)[: tensor.size].reshape(tensor.shape).copy()

    def destroy(self):
        """Free the GPU's memory. The device cannot be used afterwards."""
        self.wgpu.destroy()

    def poll(self):
        """Deliver what the GPU has finished. Does not wait."""
        self.wgpu._poll(block=False)

    def wait(self):
        """Wait until everything submitted so far is done."""
        # A readback waits for the queue; on_submitted_work_done of wgpu-py 0.32 does not match its wgpu-native.
        self.queue.read_buffer(self._fence)


def open_device(
    choice: str | None = None,
    limits: str | None = None,
    budget: int | None = None,
    kind: type[Device] = Device,
    local_rank: int = 0,
    matrix_cores: str | None = None,
) -> Device:
    """Open the adapter named by `choice`, else by LORAWGPU_DEVICE, else "auto"; `local_rank`: see `choose_adapter`.
    `matrix_cores`: auto, off or fast (docs/matrix-cores.md), else LORAWGPU_MATRIX_CORES, else auto.

    `limits="webgpu"` (or LORAWGPU_LIMITS=webgpu) requests only WebGPU's default limits, to behave as a small device
    does. `budget` caps the GPU bytes allocated. UserError if no adapter matches; DeviceError if the driver refuses.
    """
    from_environment = os.environ.get("LORAWGPU_DEVICE")
    mode = limits or os.environ.get("LORAWGPU_LIMITS") or "adapter"
    if mode not in ("adapter", "webgpu"):
        raise UserError(f"LORAWGPU_LIMITS={mode!r}: want adapter or webgpu")
    adapters = list_adapters()
    try:
        adapter, reason = choose_adapter(choice or from_environment or "auto", adapters, local_rank)
    except UserError as error:
        if from_environment and not choice and adapters:
            error = UserError(f"LORAWGPU_DEVICE: {error}")
        raise error from None
    requested = dict(DEFAULT_LIMITS)
    if mode == "adapter":
        requested.update({k: min(int(adapter.limits[k]), BINDING_CEILING) for k in ADAPTER_LIMITS})
    mode = mode_of(matrix_cores)
    if kind is not Device or mode == "off":
        return kind(adapter, reason, requested, budget)
    return _with_matrix_cores(mode, adapters.index(adapter), adapter, reason, requested, budget)


def _with_matrix_cores(mode: str, index: int, *opening) -> Device:
    """A device with matrix cores if it has them, the runtime grants them, and they compute what they should."""
    note = "this GPU or its driver has none that the runtime knows"
    if offered(opening[0]):
        try:
            device = Device(*opening, required=FEATURES)
            cores, note = found_cores(device, index)
        except DeviceError:
            cores, note = None, f"wgpu {wgpu.__version__} does not grant them"
        if cores:
            device.matrix, device.matrix_note = replace(cores, fast=mode == "fast"), note
            return device
    # A new device, because a failed trial may have lost the other one.
    device = Device(*opening)
    device.matrix_note = note
    return device
