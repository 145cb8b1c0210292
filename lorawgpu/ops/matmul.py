"""The matrix product behind every linear layer. Equations, layouts and tiles: shaders/matmul.wgsl.j2."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor

# (BM, BN, TM, TN, BK): the tile of a workgroup, the part of it that one thread holds in registers, the terms in a tile.
TILES = {
    "tall": (128, 64, 8, 8, 16),
    "medium": (64, 64, 8, 8, 16),
    "small": (64, 64, 8, 4, 32),
    "low": (32, 64, 4, 4, 16),
    "skinny": (64, 16, 4, 4, 32),
    "flat": (16, 64, 4, 4, 16),
}
BUSY = 400  # workgroups of medium tiles that keep a large GPU busy
SHORT = "low"  # the tile for large outputs of few terms: it is the writing that counts
DEPTH = 16  # the least BK
BLOCKED_TERMS = 256  # sums up to this long are taken in blocks of four; real models have none
NEVER = 0xFFFFFFFF  # a segment border that no column reaches


@dataclass(frozen=True)
class Segments:
    """Column segments of a fused projection: their padded ends, and each one's scale (1 for dense weights)."""

    ends: tuple  # cumulative, at most three
    scales: tuple

    def params(self) -> dict:
        e, w = (*self.ends[:-1], NEVER, NEVER)[:2], (*self.scales, 1.0, 1.0)[:3]
        return {"e0": e[0], "e1": e[1], "w0": w[0], "w1": w[1], "w2": w[2]}


@dataclass(frozen=True)
class LowRank:
    """A low-rank term added in the epilogue: `h` [M, ldh] times factors at element offsets of `factors`.

    kind "nk": per segment, h[:, h_off : h_off+rank] . factor[N_s, rank]^T; "kn": h . factor[rank, N], one segment.
    """

    kind: str
    h: Tensor
    factors: Tensor
    ranks: tuple
    h_offs: tuple
    f_offs: tuple

    def params(self) -> dict:
        fill = lambda name, values: {f"{name}{i}": (*values, 0, 0)[i] for i in range(3)}  # noqa: E731
        return {
            "ldh4": self.h.shape[1] // 4,
            **fill("r", self.ranks),
            **fill("h", self.h_offs),
            **fill("l", self.f_offs),
        }


NO_LORA = {"ldh4": 0, **{f"{n}{i}": 0 for n in "rhl" for i in range(3)}}
ONE_SEGMENT = Segments((NEVER,), (1.0,))


def choose_tile(m: int, n: int, kind: str = "f32", splits: int = 1) -> str:
    """The tile of a product, by its shape alone: never timed, so that a run is the same on every machine.

    kind: "f32", "int8", or "decoded" where B is ternary and becomes floats in the tile load, which a taller tile does
    less often. All tiles of a kind give the same bits.
    """
    if n <= 48:
        return "skinny"
    if m <= 48:
        return "flat"
    if workgroups(m, n) * splits >= BUSY:
        return "tall" if kind == "decoded" and m > 64 else "medium"
    return "low" if kind == "int8" else "small"


def workgroups(m: int, n: int) -> int:
    """Workgroups of a product in medium tiles."""
    return -(-m // 64) * -(-n // 64)


def matmul(
    plan,
    out,
    a,
    b,
    *,
    m,
    n,
    k,
    store="f32",
    a_layout="row",
    b_layout="nk",
    lda=None,
    ldb=None,
    a_off=0,
    b_off=0,
    o_off=0,
    ldo=None,
    slab=None,
    qscale=None,
    segments=None,
    lora=None,
    residual=None,
    accumulate=False,
    alpha=1.0,
    shift=0,
    splits=1,
    tile=None,
):
    """out[m, o_off : o_off+n] = alpha * A . B, plus what is asked for.

    m rows, n columns and k terms as stored (n and k padded to 4); strides lda, ldb, ldo (default: the last axis) and
    offsets in elements.
    `shift`: rows of A in the s-th of `segments` meet columns [s * shift, ..) of B ("kn").
    With qscale [m, 2] the product is int8 x ternary. With splits > 1 `out` is as many slabs of `slab` elements (m n by
    default), the first with the low-rank term ("kn" alone): see `sum_splits`.
    ValueError when a size is not a multiple of 4, the splits have no slabs, or more is asked than they can do.
    """
    int8 = qscale is not None
    lda, ldb, ldo, slab = lda or a.shape[-1], ldb or b.shape[-1], ldo or out.shape[-1], slab or m * n
    once = {"qscale": int8, "residual": residual, "accumulate": accumulate, "lora nk": lora and lora.kind == "nk"}
    _check_sizes(out, (n, k, lda, ldb, ldo, slab, a_off, b_off, o_off), splits, slab, once)
    depth = k // 4 if int8 else k  # int8 counts words of four
    span = -(-depth // (splits * DEPTH)) * DEPTH
    template = _template(plan, tile, m, n, depth, span, splits, store, int8) | {
        **{"a_layout": a_layout, "b_layout": b_layout, "shifted": shift > 0, "blocked": k <= BLOCKED_TERMS},
        **{"lora": lora.kind if lora else "none", "residual": residual is not None, "accumulate": accumulate},
    }
    params = {
        **{"M": m, "N4": n // 4, "K": depth, "k_span": span, "alpha": alpha, "shift4": shift // 4},
        **{"lda4": lda // 4, "ldb4": ldb if store == "ternary" else ldb // 4, "ldo4": ldo // 4, "slab4": slab // 4},
        **{"a_off4": a_off // 4, "b_off4": b_off // 4, "o_off4": o_off // 4},
        **(segments or ONE_SEGMENT).params(),
        **(lora.params() if lora else NO_LORA),
    }
    optional = {"qscale": qscale, "residual": residual, "h": lora and lora.h, "adapter": lora and lora.factors}
    buffers = {"a": a, "b": b, "out": out} | {name: tensor for name, tensor in optional.items() if tensor is not None}
    grid = (-(-n // template["BN"]), -(-m // template["BM"]), splits)
    plan.record("matmul", "main", grid, params=params, template=template, flops=2.0 * m * n * k, **buffers)


def _template(plan, tile, m, n, depth, span, splits, store, int8) -> dict:
    """The template's values that follow from the sizes and the store: the tile, and how its products are made."""
    ternary = store == "ternary"
    bm, bn, tm, tn, bk = TILES[tile or choose_tile(m, n, "int8" if int8 else "decoded" if ternary else "f32", splits)]
    bk = DEPTH if ternary else bk  # the segments of its weights end at multiples of DEPTH
    return {
        **{"BM": bm, "BN": bn, "TM": tm, "TN": tn, "BK": bk, "whole": depth % bk == 0 and span % bk == 0},
        **{"arith": "int8" if int8 else "f32", "store": "ternary_int8" if int8 else store, "scaled": ternary},
        "unroll": not plan.device.is_cpu,  # a software adapter compiles for seconds what it runs no faster
    }


def _check_sizes(out, fours: tuple, splits: int, slab: int, once: dict):
    """ValueError unless `fours` are multiples of 4, and splits have their slabs and nothing of what is done `once`."""
    if any(v % 4 for v in fours):
        raise ValueError(f"matmul {out.label}: sizes, strides and offsets must be multiples of 4, got {fours}")
    if splits > 1 and (asked := [name for name, value in once.items() if value]):
        raise ValueError(f"matmul {out.label}: {splits} splits cannot have {', '.join(asked)}")
    if splits > 1 and out.size != splits * slab:
        raise ValueError(f"matmul {out.label}: {splits} splits want {splits} x {slab} elements, got {out.size}")


def sum_splits(plan, out, parts, *, accumulate, o_off=0, ends=None):
    """out[:, o_off : o_off+n] (+)= the sum of parts [splits, m, n] over splits, in order.

    With `ends` (at most three, the last one splits) the splits fall into groups, and each group's sum goes n columns
    further right.
    """
    splits, m, n = parts.shape
    ends = ends or (splits,)
    columns = len(ends) * n // 4
    groups = -(-m * columns // 64)
    x = min(groups, 32768)
    params = {
        "count4": m * columns,
        "slab4": m * n // 4,
        "n4": n // 4,
        "columns4": columns,
        "ldo4": out.shape[-1] // 4,
        "o_off4": o_off // 4,
        "stride": x * 64,
        **{f"end{i}": (*ends, splits, splits)[i] for i in range(3)},
    }
    grid = (x, -(-groups // x))
    plan.record("sum_splits", "main", grid, overrides={"ACCUMULATE": accumulate}, params=params, parts=parts, out=out)
