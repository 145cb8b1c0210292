"""Products on matrix cores, exact to float32. Equations: shaders/matmul_cooperative.wgsl.j2.

Only products with frozen weights: adapters have few columns, and their products are bound by memory.
"""

import math
from weakref import WeakKeyDictionary

import numpy as np

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.checks import fold
from lorawgpu.ops.matmul import tiled
from lorawgpu.ops.matmul.problem import NO_LORA, SPAN_ALIGN
from lorawgpu.ops.stores import F32

DEPTH = 16  # terms per tile
FLUSH = 64  # terms after which sums move on, because matrix cores round them toward zero
# (BM, BN, WM, WN): the tile of a workgroup and of a subgroup. All fit into WebGPU's 16 KiB and 256 threads.
TILES = {
    1: (64, 256, 32, 64),  # weights of one part, exact in f16
    2: (64, 128, 32, 32),
    "int8": (64, 256, 64, 64),  # integer sums need no second set of registers
}
EXPONENT = 13  # up x lies below 2^14, far from the end of f16


def supports(capabilities, form) -> bool:
    """Frozen weights, and rows as they are stored; int8 rows only for x W^T."""
    fits = form.store is not F32 and not form.a_transposed and (not form.int8 or form.b_transposed)
    return capabilities.matrix is not None and fits


def record(plan, problem, cores=None):
    """Record a product: on matrix cores, unless it does not consist of whole tiles or adds to what is in `out`.

    cores: other matrix cores than the device's.
    """
    p, cores = problem, cores or plan.device.capabilities.matrix
    if p.m % cores.tile or p.n % cores.tile or p.k % DEPTH or p.shift or p.epilogue.accumulate:
        return tiled.record(plan, p)
    int8, e = p.qscale is not None, p.epilogue
    template = _template(cores, p, int8)
    scales = power_of_two(max(p.segments.scales)) if p.b.store.scaled and not p.b.transposed else 1.0
    segments = p.segments.params()
    params = {
        **{"M": p.m, "N4": p.n // 4, "K": p.k, "k_span": padded(-(-p.k // p.splits), SPAN_ALIGN)},
        **{"lda4": p.a.stride // 4, "ldb4": p.b.stride // 4, "ldo4": p.out.stride // 4, "slab4": p.slab_stride // 4},
        **{"a_off4": p.a.offset // 4, "b_off4": p.b.offset // 4, "o_off4": p.out.offset // 4},
        **segments | {w: segments[w] / scales for w in ("w0", "w1", "w2")},
        **{"alpha": e.alpha * scales, "b_up": 1.0 if p.b.store.scaled else matrix_up(plan, p.b)},
        **(e.lora.params() if e.lora else NO_LORA),
    }
    buffers = {"a": p.a.tensor, "b": p.b.tensor, "out": p.out.tensor}
    buffers |= {"qscale": p.qscale} if int8 else {"row_up": _row_up(plan, p)}
    buffers |= {"h": e.lora.h, "adapter": e.lora.factors} if e.lora else {}
    buffers |= {"residual": e.residual} if e.residual else {}
    grid = (-(-p.n // template["BN"]), -(-p.m // template["BM"]), p.splits)
    flops = 2.0 * p.m * p.n * (p.k + (max(e.lora.ranks) if e.lora else 0))
    plan.record("matmul_cooperative", "main", grid, params=params, template=template, flops=flops, **buffers)


def _template(cores, p, int8) -> dict:
    """Template values: the tiles, the number of f16 parts, and what is added."""
    store, b_layout = p.b.store, "nk" if p.b.transposed else "kn"
    parts_b = 1 if cores.fast else store.f16_parts
    bm, bn, wm, wn = TILES["int8" if int8 else parts_b]
    return {
        **{"engine": cores.engine, "T": cores.tile, "lanes": cores.lanes},
        **{"BM": bm, "BN": bn, "WM": wm, "WN": wn, "BK": DEPTH, "flush": 0 if int8 else FLUSH},
        **{"arith": "int8" if int8 else "f32", "parts_a": 1 if int8 or cores.fast else 2, "parts_b": parts_b},
        **{"store": store.name, "scaled": store.scaled, "b_layout": b_layout},
        **{"lora": b_layout if p.epilogue.lora else "none", "residual": p.epilogue.residual is not None},
    }


def _row_up(plan, p):
    """f32 [m]: the power of two of each row of a."""
    up = plan.scratch("row scales", p.m)
    params = {"rows": p.m, "ld4": p.a.stride // 4, "off4": p.a.offset // 4, "columns4": p.k // 4}
    plan.record("row_up", "main", fold(p.m), params=params, x=p.a.tensor, up=up)
    return up


def power_of_two(value: float) -> float:
    """The power of two in (value / 2, value]; 1 for 0."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1) if value else 1.0


_UPS = WeakKeyDictionary()  # buffer -> {range: power of two}


def matrix_up(plan, operand) -> float:
    """The power of two with which the largest magnitude of a frozen matrix lies in [2^13, 2^14). Looks once at each."""
    tensor = operand.tensor
    if plan.device.dry:
        return 1.0
    known = _UPS.setdefault(tensor.buffer, {})
    place = (tensor.offset, tensor.nbytes)
    if place not in known:
        known[place] = _measured_up(plan, operand)
    return known[place]


def _measured_up(plan, operand) -> float:
    tensor, store, device = operand.tensor, operand.store, plan.device
    lines = tensor.shape[0]
    rows, columns = lines * store.rows, store.columns(tensor.shape[-1])
    most = plan.scratch("largest weight", 4, "u32")
    device.write(most, np.zeros(most.size, np.uint32))
    blocks = rows // 4 * (columns // 4)
    params = {"blocks": blocks, "columns4": columns // 4, "ldb4": columns // 4, "b_off4": operand.offset // 4}
    with plan.section("largest weight"):
        grid = fold(-(-blocks // 128))
        plan.record("matrix_up", "main", grid, params=params, template={"store": store.name}, most=most, b=tensor)
    plan.run("largest weight")
    del plan.sections["largest weight"]
    largest = float(device.read(most).view(np.float32)[0])
    return math.ldexp(1.0, EXPONENT) / power_of_two(largest) if math.isfinite(largest) else 1.0
