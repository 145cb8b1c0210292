"""A device that only counts allocations, to find out what a run needs before it starts."""

from dataclasses import dataclass
from types import SimpleNamespace

from lorawgpu.gpu.device import DEFAULT_LIMITS, Device, list_adapters, open_device

NO_ADAPTER = SimpleNamespace(
    info={"device": "no GPU adapter here", "adapter_type": "Unknown", "backend_type": "none", "description": "none"},
    features=(),
)


@dataclass(frozen=True)
class DryBuffer:
    """Stands for a buffer of `size` bytes."""

    size: int
    label: str


class DryDevice(Device):
    """An adapter's limits and name, and a memory account. It allocates no buffer and compiles no pipeline.

    Plans can be recorded on it, with every check that does not need the driver. Running a plan or reading a tensor is
    an error.
    """

    dry = True

    def _open(self):
        self.wgpu, self.queue = DryHandle(), DryQueue()

    def wait(self):
        """Nothing was submitted."""

    def _create(self, nbytes: int, label: str, usage) -> DryBuffer:
        return DryBuffer(nbytes, label)


class DryHandle:
    """Stands for the wgpu device and pipeline, with the calls that recording makes."""

    def create_shader_module(self, label: str, code: str) -> None:
        pass

    def create_compute_pipeline(self, label: str, layout: str, compute: dict) -> "DryHandle":
        return self

    def get_bind_group_layout(self, index: int) -> None:
        pass

    def create_bind_group(self, label: str, layout: None, entries: list) -> None:
        pass


class DryQueue:
    """Discards writes."""

    def write_buffer(self, buffer: DryBuffer, offset: int, data) -> None:
        pass


def open_dry_device(
    choice: str | None = None, limits: str | None = None, budget: int | None = None, local_rank: int = 0
) -> DryDevice:
    """Like `open_device`, for a device that only counts. Without any adapter, it has WebGPU's guaranteed limits."""
    if not list_adapters():
        return DryDevice(NO_ADAPTER, "planned with the limits that WebGPU guarantees", dict(DEFAULT_LIMITS), budget)
    return open_device(choice, limits, budget, kind=DryDevice, local_rank=local_rank)
