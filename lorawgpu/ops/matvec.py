"""Linear layers for a few rows, as in decoding. Equations: shaders/matvec.wgsl.j2, matvec_input.wgsl.j2."""

import math
from dataclasses import dataclass

from lorawgpu.gpu import Tensor, padded
from lorawgpu.ops.checks import fold
from lorawgpu.ops.gate import known, layout_of
from lorawgpu.ops.matmul import NEVER, NO_LORA

MAX_ROWS = 8  # of a workgroup: the sums of all rows and lanes then fill WebGPU's 16 KiB of workgroup memory
LANES = 128  # lanes of a workgroup of matvec
UNROLL = 8  # most steps that a lane unrolls to keep loads in flight; fewer with more rows, which add loads of their own
MANY_LANES = 1 << 17  # lanes that keep a large GPU busy
INPUT_LANES = 256  # lanes of a workgroup of matvec_input
SPLITS_AHEAD = 8  # attention splits that a lane loads at once
MAX_PIECES = 8  # of a row, each with workgroups of its own in matvec_input; whoever reads h adds as many
FACTORS_AHEAD = 4  # most vec4s of a row with which a lane reads those of A before the row arrives


def lanes_for(terms: int, quads: int, strips: bool = False) -> int:
    """Lanes that share one sum of `terms` vec4s, or strips of blocks, for a weight of `quads` groups of four rows.

    As few as keep a large GPU busy, because adding up the lanes' sums costs barriers.
    """
    steps, many = (UNROLL // 2, 2 * MANY_LANES) if strips else (UNROLL, MANY_LANES)  # a strip has four loads
    enough = (lanes for lanes in (32, 64) if terms <= steps * lanes or quads * lanes >= many)
    return next(enough, LANES)


def unroll_of(steps: int, limit: int) -> int:
    """How many of a lane's `steps` to unroll: at most `limit`, with as few as possible past the end."""
    return -(-steps // -(-steps // limit))


def takes(rows: int) -> bool:
    """Whether `matvec_forward` takes so many rows: those of one workgroup, or several such blocks. Their bits agree."""
    return 1 <= rows <= MAX_ROWS or rows > 0 and rows % MAX_ROWS == 0


def matvec_forward(plan, y, x, weight, *, rows, qscale=None, lora=None, accumulate=False):
    """y [rows, weight.rows] (+)= x W^T (+ lora), like ops.linear.linear_forward, for as many rows as `takes` allows.

    x: as `input_kind(weight)` says. lora: a matmul.LowRank, with h [rows, pieces, rank] of a `LoraA`. ValueError for
    any other number of rows.
    """
    if not takes(rows):
        raise ValueError(f"matvec {y.label}: {rows} rows, want 1 to {MAX_ROWS}, or a multiple of {MAX_ROWS}")
    for part in weight.parts:
        segments, low_rank = weight.within(part, lora)
        _record(plan, y, x, weight, part, segments, low_rank, rows, qscale, accumulate)


def input_kind(weight) -> str:
    """What `matvec_forward` reads, and `matvec_input` writes, for a weight: "f32" [rows, columns], "int8" u32 [rows,
    columns / 4] with qscale, or "digits" u32 [rows, columns] (shaders/matvec_input.wgsl.j2).
    """
    return "int8" if weight.int8_input else "digits" if weight.digits_input else "f32"


def _record(plan, y, x, weight, part, segments, lora, count, qscale, accumulate):
    rows = min(count, MAX_ROWS)  # of a block
    arith, quads, store = input_kind(weight), part.rows // 4, part.store
    int8, digits, strips = arith == "int8", arith == "digits", bool(store.unit)  # strips: 16 columns share a scale
    terms = weight.columns // (16 if int8 or strips else 4)
    lanes_per_quad = lanes_for(terms, weight.rows // 4, strips)
    params = {
        "N4": quads,
        "K": terms,
        "lda4": x.shape[1] // 4,
        "ldb4": weight.columns // 4,
        "b_off4": 0,
        "ldo": y.shape[1],
        "o_off": part.start,
        **segments.params(),
        **(lora.params() if lora else NO_LORA),
    }
    buffers = {"a": x, "b": part.tensor, "out": y}
    if int8:
        buffers["qscale"] = qscale
    if lora:
        buffers |= {"h": lora.h, "adapter": lora.factors}
    together = 2 if digits and rows == 1 and weight.rows // 4 * lanes_per_quad >= 1.5 * MANY_LANES else 1
    unroll = 2 if digits and rows == 1 else 1 if strips else max(2, (UNROLL if int8 else UNROLL // 2) // rows)
    template = {
        "rows": rows,
        "wg": LANES,
        "lanes_per_quad": lanes_per_quad,
        "quads": together,
        "unroll": unroll_of(-(-terms // lanes_per_quad), unroll),
        "early": weight.rows // 4 * lanes_per_quad <= 1.5 * MANY_LANES,
        "rounded": store.affine and store.scales == "f32",
        "factored": strips and ("affine" if store.affine else "scaled"),
        "arith": arith,
        "store": store.int8_snippet if int8 else store.name,
        "lora": lora is not None,
        "pieces": math.prod(lora.h.shape[1:-1]) if lora else 1,
        "accumulate": accumulate,
    }
    grid = *fold(-(-quads // (together * (LANES // lanes_per_quad)))), count // rows
    flops = 2.0 * count * part.rows * weight.columns
    plan.record("matvec", "main", grid, params=params, template=template, flops=flops, **buffers)


@dataclass(frozen=True)
class MatvecInput:
    """Where a projection's input comes from: "rows" (x [rows, ld]), "gate" (gu) or "attention" (parts)."""

    kind: str
    x: Tensor
    act: str = ""  # for "gate", as in ops.gate.gate_forward, with x as its gu
    scale: float = 1.0
    up_off: int | None = None
    up: Tensor | None = None
    stats: Tensor | None = None  # for "attention"
    head_dim: int = 0  # for "attention"


@dataclass(frozen=True)
class LoraA:
    """The A side of a group's adapters: h [rows, pieces, ldh], which adds up to scale v A^T; `a` [total rank, ld].

    paths: (first column of h, scale) of each.
    """

    h: Tensor
    a: Tensor
    paths: tuple


def pieces_of(source: MatvecInput, width: int, normed: bool, int8: bool) -> int:
    """Into how many pieces `matvec_input` cuts a row: one if all of it must be known before any of it is written."""
    vec4s, one = padded(width) // 4, source.kind == "rows" or normed or int8
    return 1 if one else -(-vec4s // (INPUT_LANES * -(-vec4s // (INPUT_LANES * MAX_PIECES))))


def matvec_input(plan, out, source, state, *, rows, width, eps, record_id, weight=None, qscale=None, lora_a=None):
    """out [rows, ld] = v, with qscale the int8 words of v, u32 [rows, ld/4], or if out is u32 its digits, [rows, ld].

    v = rmsnorm(source, weight), or the source itself without a weight. source: a `MatvecInput`. lora_a: a `LoraA`, or
    None without adapters, with as many pieces as `pieces_of` says. Equations: shaders/matvec_input.wgsl.j2.
    """
    written = "int8" if qscale else "digits" if out.dtype == "u32" else "f32"
    ld, heads = padded(width), source.stats.shape[2] if source.stats else 0
    pieces = pieces_of(source, width, weight is not None, qscale is not None)
    per = -(-ld // 4 // (INPUT_LANES * pieces))
    layout, scaled = "", False
    if source.kind == "gate":
        layout, scaled = layout_of(source.x, rows, width, source.up_off, source.up), source.scale != 1.0
    starts, scales = zip(*(lora_a.paths if lora_a else ((0, 0.0),)), strict=True)
    params = {
        "ld4": ld // 4,
        "C": width,
        "eps": eps,
        "record_id": record_id,
        "ldh4": lora_a.h.shape[-1] // 4 if lora_a else 0,
        **dict(zip(("h1", "h2"), (*starts[1:], NEVER, NEVER), strict=False)),
        **dict(zip(("s0", "s1", "s2"), (*scales, 0.0, 0.0), strict=False)),
        "head4": source.head_dim // 4,
        "heads": heads,
        "splits": source.stats.shape[1] if source.stats else 0,
        **({"scale": source.scale} if scaled else {}),
        **({"up_off": source.up_off, "ld_gu4": source.x.shape[1] // 4} if layout == "packed" else {}),
    }
    template = {
        "wg": INPUT_LANES,
        "per": per,
        "source": source.kind,
        "act": known(source.act) if source.kind == "gate" else "",
        "layout": layout,
        "scaled": scaled,
        "norm": weight is not None,
        "written": written,
        "lora": lora_a is not None,
        "ahead": SPLITS_AHEAD,
        "ahead_a": per <= FACTORS_AHEAD,
    }
    buffers = {"x": source.x, "state": state}
    buffers |= {"stats": source.stats} if source.stats else {}
    buffers |= {"up": source.up} if source.up else {}
    buffers |= {"weight": weight} if weight else {}
    buffers |= {"y" if written == "f32" else "xq": out}
    buffers |= {"qscale": qscale} if qscale else {}
    buffers |= {"adapter": lora_a.a, "h": lora_a.h} if lora_a else {}
    grid = (1 + (lora_a.a.shape[0] // 4 if lora_a else 0), rows, pieces)
    plan.record("matvec_input", "main", grid, params=params, template=template, **buffers)
