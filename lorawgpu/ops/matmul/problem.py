"""A matrix product as data: what to compute, but not how."""

from dataclasses import dataclass, field, replace

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.stores import F32, Store

NEVER = 0xFFFFFFFF  # a segment border that no column reaches
SPAN_ALIGN = 16  # splits, and segments along the terms, end at multiples of this many terms
ROW_ALIGN = 64  # segments of a shifted product end at multiples of this many rows


@dataclass(frozen=True)
class Segments:
    """Where each of at most three matrices stacked by rows ends, and its scale (1 for stores without scales)."""

    ends: tuple  # cumulative rows
    scales: tuple

    def params(self) -> dict:
        """The fields of segments in the Params of matmul and matvec."""
        e, w = (*self.ends[:-1], NEVER, NEVER)[:2], (*self.scales, 1.0, 1.0)[:3]
        return {"e0": e[0], "e1": e[1], "w0": w[0], "w1": w[1], "w2": w[2]}


ONE_SEGMENT = Segments((NEVER,), (1.0,))


@dataclass(frozen=True)
class LowRank:
    """The adapters' term of a fused projection: `h` [M, ldh] times factors at offsets (in elements) into `factors`.

    With W^T, for each segment s: h[:, h_off : h_off + rank] . factor[N_s, rank]^T. With W: h . factor[rank, N].
    """

    h: Tensor
    factors: Tensor
    ranks: tuple
    h_offs: tuple
    f_offs: tuple

    def params(self) -> dict:
        """The fields of the low-rank term in the Params of matmul and matvec."""
        fill = lambda name, values: {f"{name}{i}": (*values, 0, 0)[i] for i in range(3)}  # noqa: E731
        return {
            "ldh4": self.h.shape[-1] // 4,
            **fill("r", self.ranks),
            **fill("h", self.h_offs),
            **fill("l", self.f_offs),
        }


NO_LORA = {"ldh4": 0, **{f"{n}{i}": 0 for n in "rhl" for i in range(3)}}


@dataclass(frozen=True)
class Operand:
    """A matrix in a tensor, from element `offset` on, with `width` columns per stored row (default: the last axis)."""

    tensor: Tensor
    offset: int = 0
    width: int = 0
    store: Store = F32
    transposed: bool = False

    @property
    def T(self) -> "Operand":  # noqa: N802
        """Its transpose, as NumPy writes it."""
        return replace(self, transposed=not self.transposed)

    @property
    def stride(self) -> int:
        return self.width or self.store.columns(self.tensor.shape[-1])


@dataclass(frozen=True)
class Epilogue:
    """How a sum is written: out = alpha * sum (+ lora) (+ residual) (+ out)."""

    alpha: float = 1.0
    lora: LowRank | None = None
    residual: Tensor | None = None
    accumulate: bool = False


@dataclass(frozen=True)
class Form:
    """All that may decide a problem's kernel. Sizes may not, so that a token has the same bits in every batch."""

    store: Store
    int8: bool
    a_transposed: bool
    b_transposed: bool


@dataclass(frozen=True)
class Problem:
    """out (m, n) = a (m, k) . b (k, n), then the epilogue. n and k include padding (to 4).

    b is W, or W^T written as Operand(..).T. `segments`: those of W's rows, with scales if the store has them.
    With `qscale` u32 [m, 2] (ops/quantize.py), a holds int8 words.
    `splits` > 1: each split sums its own span of the terms into its own slab of out, `slab` elements apart (default
    m n); the first adds the low-rank term. See `split_matmul`.
    `shift`: rows of a in segment s are multiplied with the columns of b from s * shift on.
    `few_terms`: the sums are so short that writing out dominates the time.
    ValueError if a size is not a multiple of 4, out does not hold the slabs, or each split would add the same term.
    """

    m: int
    n: int
    k: int
    out: Operand
    a: Operand
    b: Operand
    epilogue: Epilogue = field(default_factory=Epilogue)
    segments: Segments = ONE_SEGMENT
    qscale: Tensor | None = None
    splits: int = 1
    slab: int = 0
    shift: int = 0
    few_terms: bool = False

    def __post_init__(self):
        label, parts = self.out.tensor.label, (self.out, self.a, self.b)
        sizes = (self.n, self.k, self.slab_stride, *(p.stride for p in parts), *(p.offset for p in parts))
        if any(size % 4 for size in sizes):
            raise ValueError(f"matmul {label}: sizes, strides and offsets must be multiples of 4, got {sizes}")
        if self.splits == 1:
            return
        once = {
            "qscale": self.qscale,
            "a residual": self.epilogue.residual,
            "accumulate": self.epilogue.accumulate,
            "adapters with W^T": self.epilogue.lora and self.b.transposed,
        }
        if found := [name for name, value in once.items() if value]:
            raise ValueError(f"matmul {label}: {self.splits} splits cannot have {', '.join(found)}")
        if (size := self.out.tensor.size) != self.splits * self.slab_stride:
            raise ValueError(
                f"matmul {label}: {self.splits} splits want as many slabs of {self.slab_stride} elements, got {size}"
            )

    @property
    def slab_stride(self) -> int:
        """Elements between the starts of two slabs of `out`."""
        return self.slab or self.m * self.n

    @property
    def form(self) -> Form:
        return Form(self.b.store, self.qscale is not None, self.a.transposed, self.b.transposed)
