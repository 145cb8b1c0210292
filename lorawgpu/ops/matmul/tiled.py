"""The register-tiled kernel, which supports every product on every device. Equations: shaders/matmul.wgsl.j2."""

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.matmul.problem import NO_LORA, ROW_ALIGN, SPAN_ALIGN
from lorawgpu.ops.matmul.tuning import tuning_of

# (BM, BN, TM, TN, BK): the tile of a workgroup, the register tile of a thread, and the terms per tile.
TILES = {
    "tall": (128, 64, 8, 8, 16),
    "medium": (64, 64, 8, 8, 16),
    "small": (64, 64, 8, 4, 32),
    "low": (32, 64, 4, 4, 16),
    "skinny": (64, 16, 4, 4, 32),
    "flat": (16, 64, 4, 4, 16),
}
MEMORY = max((bm + bn) * bk * 4 for bm, bn, _, _, bk in TILES.values())  # most workgroup memory, in bytes
BLOCKED_TERMS = 256  # sums of up to this many terms use blocks of four; real models have no such sums


def supports(capabilities, form) -> bool:
    """All float products; with int8 rows only x W^T, for a store with an int8 snippet."""
    forward = form.b_transposed and not form.a_transposed
    return capabilities.workgroup_memory >= MEMORY and (not form.int8 or form.store.int8_input and forward)


def record(plan, problem, tile=None):
    """Record a product. `tile`: a key of TILES, instead of the choice by shape.

    ValueError if a segment ends inside a tile.
    """
    p, e, int8 = problem, problem.epilogue, problem.qscale is not None
    _check_segments(p)
    depth = p.k // 4 if int8 else p.k  # int8 counts words of four
    span = padded(-(-depth // p.splits), SPAN_ALIGN)
    template = _template(plan.device.capabilities, p, tile or choose_tile(p, plan.device.capabilities), depth, span)
    params = {
        **{"M": p.m, "N4": p.n // 4, "K": depth, "k_span": span, "alpha": e.alpha, "shift4": p.shift // 4},
        **{"lda4": p.a.stride // 4, "ldb4": p.b.stride // 4, "ldo4": p.out.stride // 4, "slab4": p.slab_stride // 4},
        **{"a_off4": p.a.offset // 4, "b_off4": p.b.offset // 4, "o_off4": p.out.offset // 4},
        **p.segments.params(),
        **(e.lora.params() if e.lora else NO_LORA),
    }
    optional = {"qscale": p.qscale, "residual": e.residual}
    optional |= {"h": e.lora.h, "adapter": e.lora.factors} if e.lora else {}
    buffers = {"a": p.a.tensor, "b": p.b.tensor, "out": p.out.tensor}
    buffers |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    grid = (-(-p.n // template["BN"]), -(-p.m // template["BM"]), p.splits)
    terms = p.k + (max(e.lora.ranks) if e.lora else 0)
    plan.record("matmul", "main", grid, params=params, template=template, flops=2.0 * p.m * p.n * terms, **buffers)


def choose_tile(problem, capabilities) -> str:
    """The tile for a product, by its shape and the device's tuning: nothing is timed.

    All tiles give the same bits.
    """
    m, n, int8 = problem.m, problem.n, problem.qscale is not None
    if problem.few_terms:
        return "low"
    if problem.shift or n <= 48:
        return "skinny"
    if m <= 48:
        return "flat"
    if workgroups(m, n) * problem.splits >= tuning_of(capabilities).busy:
        return "tall" if problem.b.store.decoded and not int8 and m > 64 else "medium"
    return "low" if int8 else "small"


def workgroups(m: int, n: int) -> int:
    """Workgroups of a product with medium tiles."""
    return -(-m // 64) * -(-n // 64)


def _template(capabilities, p, tile, depth, span) -> dict:
    """Template values: the tile, how products are computed, and what the epilogue adds."""
    store, e, int8 = p.b.store, p.epilogue, p.qscale is not None
    bm, bn, tm, tn, bk = TILES[tile]
    bk = SPAN_ALIGN if store.scaled else bk  # so that a tile of W lies in one segment
    b_layout = "nk" if p.b.transposed else "kn"
    return {
        **{"BM": bm, "BN": bn, "TM": tm, "TN": tn, "BK": bk, "whole": depth % bk == 0 and span % bk == 0},
        **{"a_layout": "col" if p.a.transposed else "row", "b_layout": b_layout, "shifted": p.shift > 0},
        **{"arith": "int8" if int8 else "f32", "store": store.int8_snippet if int8 else store.name},
        **{"scaled": store.scaled, "blocked": p.k <= BLOCKED_TERMS},
        **{"lora": b_layout if e.lora else "none", "residual": e.residual is not None, "accumulate": e.accumulate},
        "software": capabilities.software,  # on software adapters, unrolled code compiles slowly and gains nothing
    }


def _check_segments(p):
    """Segments along the terms, and along the rows of a shifted product, must end at whole tiles."""
    scaled_terms = p.b.store.scaled and not p.b.transposed
    align = ROW_ALIGN if p.shift else SPAN_ALIGN if scaled_terms else 1
    if any(end % align for end in p.segments.ends[:-1]):
        raise ValueError(f"matmul {p.out.tensor.label}: segments must end at multiples of {align}: {p.segments.ends}")
