"""Linear layers for one to eight rows, as in decoding. Equations: shaders/matvec.wgsl.j2, matvec_input.wgsl.j2."""

from dataclasses import dataclass

from lorawgpu.gpu import Tensor, padded
from lorawgpu.ops.checks import fold
from lorawgpu.ops.matmul import NEVER, NO_LORA

MAX_ROWS = 8  # sums of all rows and lanes fill WebGPU's 16 KiB of workgroup memory
LANES = 128  # of a workgroup
UNROLL = 8  # steps that a lane unrolls to have loads in flight, at most; fewer with more rows, which add their own
MANY_LANES = 1 << 17
INPUT_LANES = 256
SPLITS_AHEAD = 8  # parts of the attention that a lane loads at once


def team_of(terms: int, quads: int) -> int:
    """Lanes that share a sum of `terms` vec4s, of `quads` in all: more where there would be too few of them to keep a
    large card busy, few where there are enough, since their last sums cost barriers."""
    enough = (team for team in (32, 64) if terms <= UNROLL * team or quads * team >= MANY_LANES)
    return next(enough, LANES)


def unroll_of(steps: int, most: int) -> int:
    """Steps of a lane to unroll, at most `most`, with as few as possible past the end."""
    return -(-steps // -(-steps // most))


def matvec_forward(plan, y, x, weight, *, rows, qscale=None, lora=None, accumulate=False):
    """y [rows, weight.rows] (+)= x W^T (+ lora): as ops.linear.linear_forward, for at most MAX_ROWS rows.

    lora: a matmul.LowRank. ValueError for more rows.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"matvec {y.label}: {rows} rows, want 1 to {MAX_ROWS}")
    for part in weight.parts:
        segments, low_rank = weight.within(part, lora)
        _record(plan, y, x, weight, part, segments, low_rank, rows, qscale, accumulate)


def _record(plan, y, x, weight, part, segments, lora, rows, qscale, accumulate):
    int8, quads, store = qscale is not None, part.rows // 4, part.store
    terms = weight.columns // (16 if int8 else 4)
    team = team_of(terms, weight.rows // 4)
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
    template = {
        "rows": rows,
        "wg": LANES,
        "team": team,
        "unroll": unroll_of(-(-terms // team), max(2, (UNROLL if int8 else UNROLL // 2) // rows)),
        "arith": "int8" if int8 else "f32",
        "store": store.int8_snippet if int8 else store.name,
        "lora": lora is not None,
        "accumulate": accumulate,
    }
    grid = fold(-(-quads // (LANES // team)))
    flops = 2.0 * rows * part.rows * weight.columns
    plan.record("matvec", "main", grid, params=params, template=template, flops=flops, **buffers)


@dataclass(frozen=True)
class Source:
    """What a projection reads before its norm: "rows" x [rows, ld], "gate" gu [rows, 2 ld], "attention" its parts."""

    kind: str
    x: Tensor
    act: str = ""  # of "gate": "silu" or "relu2"
    stats: Tensor | None = None  # of "attention", with its head size
    head_dim: int = 0


@dataclass(frozen=True)
class Down:
    """The adapters of a group: h [rows, ldh] = scale v A^T. `a` [rank, ld]; (first column of h, scale) of each path."""

    h: Tensor
    a: Tensor
    paths: tuple


def matvec_input(plan, out, source, state, *, rows, width, eps, record_id, weight=None, qscale=None, down=None):
    """out [rows, ld] = v, or with qscale its int8 words u32 [rows, ld/4]; v = rmsnorm(source, weight), or source alone.

    down: a `Down`, or None without adapters. Equations: shaders/matvec_input.wgsl.j2.
    """
    ld, heads = padded(width), source.stats.shape[2] if source.stats else 0
    starts, scales = zip(*(down.paths if down else ((0, 0.0),)), strict=True)
    params = {
        "ld4": ld // 4,
        "C": width,
        "eps": eps,
        "record_id": record_id,
        "ldh4": down.h.shape[1] // 4 if down else 0,
        **dict(zip(("h1", "h2"), (*starts[1:], NEVER, NEVER), strict=False)),
        **dict(zip(("s0", "s1", "s2"), (*scales, 0.0, 0.0), strict=False)),
        "head4": source.head_dim // 4,
        "heads": heads,
        "splits": source.stats.shape[1] if source.stats else 0,
    }
    template = {
        "wg": INPUT_LANES,
        "per": -(-ld // 4 // INPUT_LANES),
        "source": source.kind,
        "act": source.act,
        "norm": weight is not None,
        "quantized": qscale is not None,
        "lora": down is not None,
        "ahead": SPLITS_AHEAD,
    }
    buffers = {"x": source.x, "state": state}
    buffers |= {"stats": source.stats} if source.stats else {}
    buffers |= {"weight": weight} if weight else {}
    buffers |= {"xq": out, "qscale": qscale} if qscale else {"y": out}
    buffers |= {"adapter": down.a, "h": down.h} if down else {}
    grid = (1 + (down.a.shape[0] // 4 if down else 0), rows)
    plan.record("matvec_input", "main", grid, params=params, template=template, **buffers)
