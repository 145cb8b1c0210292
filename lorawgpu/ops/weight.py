"""A frozen weight on the device, as the ops that read it know it: rows in parts, each with its store."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.matmul import LowRank, Segments
from lorawgpu.ops.stores import Store


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a weight, of one store and in one binding."""

    start: int
    stop: int
    tensor: Tensor
    store: Store

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Weight:
    """`rows` x `columns` (both padded to 16, the padding worth zero) of matrices stacked by rows, cut into parts.

    `segments`: where each of those matrices ends, with its scale.
    ValueError when some parts want their input quantized and others do not: they are multiplied with the same rows.
    """

    rows: int
    columns: int
    segments: Segments
    parts: tuple

    def __post_init__(self):
        if len({part.store.int8_input for part in self.parts}) > 1:
            stores = sorted({part.store.name for part in self.parts})
            raise ValueError(
                f"{self.parts[0].tensor.label}: {', '.join(stores)} cannot be fused: not all take int8 rows"
            )

    @property
    def int8_input(self) -> bool:
        """Whether the rows that it is multiplied with are quantized per token (BitLinear)."""
        return self.parts[0].store.int8_input

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self.parts)

    def within(self, part: Part, lora: LowRank | None = None) -> tuple[Segments, LowRank | None]:
        """Segments, and the term of adapters, of the rows of one part."""
        ends = [min(end, part.stop) - part.start for end in self.segments.ends if end > part.start]
        first = len(self.segments.ends) - len(ends)
        segments = Segments(tuple(ends), self.segments.scales[first : first + len(ends)])
        if lora is None:
            return segments, None
        begins = [0, *self.segments.ends][first : first + len(ends)]
        skipped = [max(part.start - b, 0) * r for b, r in zip(begins, lora.ranks[first:], strict=False)]
        f_offs = tuple(f + s for f, s in zip(lora.f_offs[first:], skipped, strict=False))
        return segments, LowRank(lora.h, lora.factors, lora.ranks[first:], lora.h_offs[first:], f_offs)
