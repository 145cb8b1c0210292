"""The context that is passed along while the forward and the backward pass are recorded."""

from dataclasses import dataclass, field, replace

import numpy as np

from lorawgpu.families.modules import EMBEDDING, HEAD
from lorawgpu.gpu import Plan, Workspace
from lorawgpu.gpu.tensor import DTYPES, Tensor, padded
from lorawgpu.lora.flat import Flat, take, write
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.ops.matmul import Segments
from lorawgpu.ops.stores import F32
from lorawgpu.ops.weight import Part, Weight
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
    order: Tensor  # rows sorted by id, for the gradient of the embedding; the tail is -1
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
            one("order", capacity),
            *_per_layer(device, model, capacity),
        )

    def rows(self, count: int) -> "StepData":
        """The same buffers, cut to `count` rows."""
        cut = [t.view(0, (count,)) for t in (self.ids, self.position, self.slot, self.kv_start, self.segment_end)]
        per_layer = tuple(t.view(0, (count, t.shape[1])) for t in self.per_layer)
        order = self.order.view(0, (count,))
        return StepData(*cut, self.target_rows, self.target_ids, order, per_layer, self.width, self.staging)

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
    """The flat buffers of an adapter. Inference has only `params`. `ids`: those of the trained rows, and the row of
    each id or -1, for EMBEDDING and HEAD."""

    layout: AdapterLayout
    params: Flat
    grads: Flat | None = None
    m: Flat | None = None
    v: Flat | None = None
    ids: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def create(device, layout: AdapterLayout, tensors: dict, **training: Flat) -> "AdapterBuffers":
        """With the values of `tensors`, by PEFT name. training: the buffers of gradients and moments."""
        params, ids = take(device, layout.buffers, "adapter params", "adapter"), {}
        write(device, params, layout.flatten(tensors))
        for tokens in {id(t): t for t in layout.tokens.values()}.values():
            rows = np.full(layout.model.vocab_size, -1, np.int32)
            rows[list(tokens.ids)] = np.arange(len(tokens.ids))
            pair = (
                device.upload(np.array(tokens.ids, np.int32), label="trained ids", kind="adapter"),
                device.upload(rows, label="rows of ids", kind="adapter"),
            )
            ids |= dict.fromkeys(tokens.ends, pair)
        return AdapterBuffers(layout, params, ids=ids, **training)

    def matrix(self, end: str) -> Weight | None:
        """A matrix that is trained whole, or None."""
        if end not in self.layout.matrices:
            return None
        rows, columns = self.layout.matrices[end].stored
        parts = (Part(*rows, tensor, F32) for rows, tensor in self.rows_of(self.params, end))
        return Weight(rows, columns, Segments((rows,), (1.0,)), tuple(parts))

    def rows_of(self, flat: Flat, end: str) -> list[tuple[tuple[int, int], Tensor]]:
        """The parts of such a matrix in a flat buffer, each with its range of rows."""
        slot = self.layout.matrices[end]
        width = slot.stored[1]
        return [
            ((a, b), flat.view(slot.start + a * width, (b - a, width), slot.name)) for a, b in self.layout.parts(end)
        ]

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

    @property
    def embedding(self) -> Weight:
        return self.adapter and self.adapter.matrix(EMBEDDING) or self.model.embedding

    @property
    def head(self) -> Weight:
        return self.adapter and self.adapter.matrix(HEAD) or self.model.head
