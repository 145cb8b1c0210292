"""The context that is passed along while the forward and the backward pass are recorded."""

from dataclasses import dataclass, field

from lorawgpu.gpu import Plan, Workspace
from lorawgpu.gpu.tensor import Tensor
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.weights.device_model import Layer, Model


@dataclass(frozen=True)
class StepData:
    """The arrays of one micro-batch on the GPU (data.batching.MicroBatch), at their largest capacity."""

    ids: Tensor
    position: Tensor
    slot: Tensor
    kv_start: Tensor
    segment_end: Tensor
    target_rows: Tensor
    target_ids: Tensor

    @staticmethod
    def create(device, capacity: int, targets: int) -> "StepData":
        """Buffers for `capacity` rows and up to `targets` target rows."""

        def one(name, length):
            return device.tensor((length,), "i32", name, "step")

        return StepData(
            *(one(n, capacity) for n in ("ids", "position", "slot", "kv_start", "segment_end")),
            one("target_rows", targets),
            one("target_ids", targets),
        )

    def rows(self, count: int) -> "StepData":
        """The same buffers, cut to `count` rows."""
        cut = [t.view(0, (count,)) for t in (self.ids, self.position, self.slot, self.kv_start, self.segment_end)]
        return StepData(*cut, self.target_rows, self.target_ids)


@dataclass(frozen=True)
class AdapterBuffers:
    """The flat buffers of an adapter. Inference has only `params`."""

    layout: AdapterLayout
    params: Tensor
    grads: Tensor | None = None
    m: Tensor | None = None
    v: Tensor | None = None

    def group(self, layer: int, name: str):
        """The GroupLayout of a layer's group, or None if the group has no adapter."""
        return self.layout.groups.get((layer, name))


@dataclass
class NonFiniteIds:
    """Ids of the tensors that kernels check for non-finite values, so that the host can name the first bad one."""

    names: list = field(default_factory=list)

    def id(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


@dataclass
class Context:
    """What is being recorded, and for what. `rows`: capacity of the plan; all activations have that many rows."""

    plan: Plan
    work: Workspace
    model: Model
    rows: int
    batch: StepData
    ropes: RopeTables
    state: Tensor
    step: Tensor
    non_finite: NonFiniteIds
    adapter: AdapterBuffers | None = None
    dropout: float = 0.0
    attention: str = "flash"

    @property
    def config(self):
        return self.model.config

    @property
    def hidden(self) -> int:
        """The padded width of the residual stream."""
        return self.model.hidden

    def take(self, width: int, label: str, dtype: str = "f32") -> Tensor:
        """Scratch of `rows` x `width`, where `width` includes padding."""
        return self.work.take((self.rows, width), dtype, label)

    def keep(self, width: int, label: str) -> Tensor:
        """The same, kept until the end of the plan."""
        return self.work.take((self.rows, width), label=label, kept=True)

    def group(self, layer: Layer, name: str):
        return self.adapter.group(layer.index, name) if self.adapter else None
