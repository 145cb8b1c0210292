"""The context that is passed along while the forward and the backward pass are recorded."""

from dataclasses import dataclass, field, replace

import numpy as np

from lorawgpu.gpu import Plan, Workspace
from lorawgpu.gpu.tensor import DTYPES, Tensor, padded
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.weights.device_model import Layer, Model

ROW_BLOCK = 64  # rows of a block are a multiple: whole tiles, and views that begin at aligned bytes
GATHERED = 256  # rows of the table at a time: few enough to stay in the processor's cache while they are sorted


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
    per_layer: tuple[Tensor, ...] = ()  # [rows, padded(P)] of each layer: rows of the table of per-layer inputs
    width: int = 0  # P
    staging: np.ndarray | None = None  # [layers, rows, padded(P)] on the host, where the rows are sorted by layer

    @staticmethod
    def create(device, model: Model, capacity: int, targets: int) -> "StepData":
        """Buffers for `capacity` rows and up to `targets` target rows."""

        def one(name, length):
            return device.tensor((length,), "i32", name, "step")

        return StepData(
            *(one(n, capacity) for n in ("ids", "position", "slot", "kv_start", "segment_end")),
            one("target_rows", targets),
            one("target_ids", targets),
            *_per_layer(device, model, capacity),
        )

    def rows(self, count: int) -> "StepData":
        """The same buffers, cut to `count` rows."""
        cut = [t.view(0, (count,)) for t in (self.ids, self.position, self.slot, self.kv_start, self.segment_end)]
        per_layer = tuple(t.view(0, (count, t.shape[1])) for t in self.per_layer)
        return StepData(*cut, self.target_rows, self.target_ids, per_layer, self.width, self.staging)

    def write_per_layer(self, device, model: Model, ids: np.ndarray) -> None:
        """Gather the table's rows of the tokens `ids` from disk and write them for each layer."""
        if not self.per_layer:
            return
        for start in range(0, len(ids), GATHERED):
            rows = model.per_layer.gather(ids[start : start + GATHERED]).reshape(-1, len(self.per_layer), self.width)
            self.staging[:, start : start + len(rows), : self.width] = rows.swapaxes(0, 1)
        for tensor, values in zip(self.per_layer, self.staging[:, : len(ids)], strict=True):
            device.write(tensor.view(0, values.shape), values)


def _per_layer(device, model: Model, capacity: int) -> tuple:
    """The last three fields of StepData; none if the model has no per-layer inputs."""
    if not model.per_layer:
        return ()
    width, dtype = model.config.per_layer_input, model.per_layer.dtype
    shape = (capacity, padded(width))
    names = (f"per-layer input {layer.index}" for layer in model.layers)
    tensors = tuple(device.tensor(shape, dtype, name, "step") for name in names)
    return tensors, width, np.zeros((len(tensors), *shape), DTYPES[dtype])


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
    """What is being recorded, and for what. All activations have `rows` rows: the plan's capacity, or those of a block
    of rows that begins at `first_row`."""

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
    first_row: int = 0
    embedded: Tensor | None = None  # [rows, C] the embedding of the batch, for per-layer inputs
    room: int = 0  # elements of a free buffer that the backward has anyway, for sums of splits
    shared_dkv: dict = field(default_factory=dict)  # layer -> its dk and dv, as far as its readers have added to them

    @property
    def config(self):
        return self.model.config

    @property
    def hidden(self) -> int:
        """The padded width of the residual stream."""
        return self.model.hidden

    def row_blocks(self, width: int) -> list[tuple[int, int]]:
        """All rows in ranges [start, stop) so short that f32 activations of `width` columns fit into a binding.

        All ranges but the last have the same length in plans of all capacities, so that these can share buffers.
        """
        fits = max(ROW_BLOCK, self.plan.device.max_binding // (4 * width) // ROW_BLOCK * ROW_BLOCK)
        return [(start, min(start + fits, self.rows)) for start in range(0, self.rows, fits)]

    def of_rows(self, start: int, stop: int) -> "Context":
        """The context for a block of rows. Not for what reads the batch."""
        return replace(self, rows=stop - start, first_row=start)

    def take(self, width: int, label: str, dtype: str = "f32") -> Tensor:
        """Scratch of `rows` x `width`, where `width` includes padding."""
        return self.work.take((self.rows, width), dtype, label)

    def keep(self, width: int, label: str) -> Tensor:
        """The same, kept until the end of the plan."""
        return self.work.take((self.rows, width), label=label, kept=True)

    def group(self, layer: Layer, name: str):
        return self.adapter.group(layer.index, name) if self.adapter else None
