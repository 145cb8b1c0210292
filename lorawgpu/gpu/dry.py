"""A device that counts what it is asked for and allocates nothing: to know what a run needs before it starts."""

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
    """The limits and the name of an adapter, with its memory account. Buffers are promises, pipelines compile nothing.

    Plans can be recorded on it with everything checked that is checked before the driver sees it; running one, or
    reading a tensor, is an error.
    """

    dry = True

    def _open(self):
        self.wgpu, self.queue = DryHandle(), DryQueue()

    def _create(self, nbytes: int, label: str, usage) -> DryBuffer:
        return DryBuffer(nbytes, label)


class DryHandle:
    """What recording asks of wgpu."""

    def create_shader_module(self, label: str, code: str) -> None:
        pass

    def create_compute_pipeline(self, label: str, layout: str, compute: dict) -> "DryHandle":
        return self

    def get_bind_group_layout(self, index: int) -> None:
        pass

    def create_bind_group(self, label: str, layout: None, entries: list) -> None:
        pass


class DryQueue:
    """Writes go nowhere."""

    def write_buffer(self, buffer: DryBuffer, offset: int, data) -> None:
        pass


def open_dry_device(choice: str | None = None, limits: str | None = None, budget: int | None = None) -> DryDevice:
    """As `open_device`, for a device that only counts; where there is no adapter at all, one of WebGPU's limits."""
    if not list_adapters():
        return DryDevice(NO_ADAPTER, "planned with the limits that WebGPU guarantees", dict(DEFAULT_LIMITS), budget)
    return open_device(choice, limits, budget, kind=DryDevice)
