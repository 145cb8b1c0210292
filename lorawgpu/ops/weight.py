"""A frozen weight on the device, as ops see it: parts of its rows, each with its store."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.matmul import LowRank, Segments
from lorawgpu.ops.stores import Store


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a weight, in one store and one binding."""

    start: int
    stop: int
    tensor: Tensor
    store: Store

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Weight:
    """Matrices stacked by rows, `rows` x `columns` (both padded to 16 with zero weights), cut into parts.

    `segments`: where each matrix ends, and its scale.
    ValueError if only some parts need a quantized input, because all parts are multiplied with the same rows.
    """

    rows: int
    columns: int
    segments: Segments
    parts: tuple

    def __post_init__(self):
        if len({part.store.int8_input for part in self.parts}) > 1:
            stores = sorted({part.store.name for part in self.parts})
            raise ValueError(
                f"{self.parts[0].tensor.label}: {', '.join(stores)} cannot be fused, because not all take int8 rows"
            )

    @property
    def int8_input(self) -> bool:
        """Whether its input is quantized to int8 per token (BitLinear)."""
        return self.parts[0].store.int8_input

    @property
    def digits_input(self) -> bool:
        """Whether `ops.matvec` multiplies its integer codes with the digits of its input."""
        return all(part.store.int8_codes for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.tensor.nbytes for part in self.parts)

    def within(self, part: Part, lora: LowRank | None = None) -> tuple[Segments, LowRank | None]:
        """The segments, and the adapters' term, restricted to the rows of one part."""
        ends = [min(end, part.stop) - part.start for end in self.segments.ends if end > part.start]
        first = len(self.segments.ends) - len(ends)
        segments = Segments(tuple(ends), self.segments.scales[first : first + len(ends)])
        if lora is None:
            return segments, None
        begins = [0, *self.segments.ends][first : first + len(ends)]
        skipped = [max(part.start - b, 0) * r for b, r in zip(begins, lora.ranks[first:], strict=False)]
        f_offs = tuple(f + s for f, s in zip(lora.f_offs[first:], skipped, strict=False))
        return segments, LowRank(lora.h, lora.factors, lora.ranks[first:], lora.h_offs[first:], f_offs)
