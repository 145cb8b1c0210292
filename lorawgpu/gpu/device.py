"""Choose an adapter, request exactly the limits that the kernels need, and allocate buffers while counting bytes."""

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import wgpu

from lorawgpu.errors import DeviceError, UserError
from lorawgpu.gpu.capabilities import Capabilities
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
_RANK = {"DiscreteGPU": 0, "IntegratedGPU": 1, "Unknown": 2, "CPU": 3}
INSTALL_HINT = (
    "install a Vulkan driver (Debian/Ubuntu: `apt-get install mesa-vulkan-drivers libvulkan1`, which also brings "
    "a software adapter; NVIDIA: the vendor driver; macOS and Windows need nothing)"
)


def list_adapters() -> list:
    """All adapters that can run compute, best first: discrete, integrated, CPU. OpenGL adapters are left out."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # otherwise Mesa prints a warning per adapter
    found = [a for a in wgpu.gpu.enumerate_adapters_sync() if a.info["backend_type"] in ("Vulkan", "Metal", "D3D12")]
    return sorted(found, key=lambda a: _RANK.get(a.info["adapter_type"], 2))


def choose_adapter(choice: str, adapters: list, local_rank: int = 0):
    """(adapter, reason) for `auto|cpu|gpu|INDEX|NAME`, or several of these with commas. UserError if none matches.

    local_rank: the number of this process among those of its machine, which take turns at the entries and at the
    adapters that match them.
    """
    if not adapters:
        raise UserError(f"no GPU adapter found: {INSTALL_HINT}")
    entries = [choice]
    if "," in choice and not any(choice.lower() in a.info["device"].lower() for a in adapters):
        entries = [entry.strip() for entry in choice.split(",")]
    turn, place = divmod(local_rank, len(entries))
    entry = entries[place]
    found, reason = _matching(entry, adapters)
    turn = turn * entries.count(entry) + entries[:place].count(entry)
    return found[turn % len(found)], reason + (", which other processes use too" if turn >= len(found) else "")


def _matching(choice: str, adapters: list) -> tuple[list, str]:
    """The adapters of one entry, best first, and why. UserError if there is none."""
    names = [
        f"{i}: {a.info['device']} ({a.info['adapter_type']}, {a.info['backend_type']})" for i, a in enumerate(adapters)
    ]
    listing = "\n  ".join(names)
    cpus = [a for a in adapters if a.info["adapter_type"] == "CPU"]
    gpus = [a for a in adapters if a.info["adapter_type"] != "CPU"]
    # With two backends, Windows lists each GPU twice.
    gpus = [a for a in gpus if a.info["backend_type"] == gpus[0].info["backend_type"]]
    if choice == "auto":
        note = f"the best of {len(adapters)}" if gpus else "no GPU found, using the CPU, which is slow"
        return gpus or cpus, f"device auto: {note}"
    if choice in ("cpu", "gpu"):
        if found := cpus if choice == "cpu" else gpus:
            return found, f"device {choice}"
        raise UserError(f"device {choice!r}: no such adapter; found\n  {listing}\n{INSTALL_HINT}")
    if choice.isdecimal() and len(choice) < 10:
        if int(choice) < len(adapters):
            return [adapters[int(choice)]], f"device {choice}"
        raise UserError(f"device {choice!r}: no adapter has that index; found\n  {listing}")
    if found := [a for a in adapters if choice and choice.lower() in a.info["device"].lower()]:
        found = [a for a in found if a.info["backend_type"] == found[0].info["backend_type"]]
        return found, f"device name contains {choice!r}"
    raise UserError(f"device {choice!r}: want auto, cpu, gpu, an index or a part of a name of\n  {listing}")


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

    def __init__(self, adapter, reason: str, limits: dict, budget: int | None = None):
        self.adapter, self.reason, self.limits = adapter, reason, limits
        self.info = adapter.info
        self.features = [f for f in OPTIONAL_FEATURES if f in adapter.features]
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
        return Capabilities(self.is_cpu, memory, frozenset(self.features), kind, vendor, lanes_of(self.info))

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
) -> Device:
    """Open the adapter named by `choice`, else by LORAWGPU_DEVICE, else "auto"; `local_rank`: see `choose_adapter`.

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
    return kind(adapter, reason, requested, budget)
