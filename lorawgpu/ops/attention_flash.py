"""Flash attention: nothing of size rows x slots is stored.

Equations and guarantees: shaders/attention_flash_*.wgsl.j2; tiles: shaders/common/flash_products.wgsl.j2.
`problem` is an ops.attention.AttentionProblem, checked there. The backward has two passes: dq, then dk and dv. Where
scratch is free, the first leaves the weight of each visible pair of a row and a key, and its gradient, to the second.
"""

import math
from typing import NamedTuple

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.checks import fold, fold_elements


class Tile(NamedTuple):
    """The tile of a workgroup, under the template's names.

    ty x tx threads (powers of two, at least 4 x 8); rt rows and ct columns per thread (multiples of 4); kc vec4s of
    depth in workgroup memory (divides tx and ty).
    """

    ty: int
    tx: int
    rt: int
    ct: int
    kc: int

    @property
    def rows(self) -> int:
        return self.ty * self.rt


SMALL = Tile(8, 8, 4, 4, 4)  # compiles quickly, for the models of the tests
WIDE = Tile(8, 16, 8, 4, 4)
VAST = Tile(8, 32, 8, 4, 4)
# Largest head_dim -> tile, for each kernel. A thread holds rt x ct scores (twice that in the backward) and
# rt x head_dim/tx sums (twice that in dkv). The limits are 255 registers and 16 KiB of workgroup memory.
TILES = {
    "forward": {32: SMALL, 64: Tile(8, 16, 4, 4, 8), 96: Tile(16, 8, 4, 8, 4), 128: WIDE, 512: VAST},
    "dq": {32: SMALL, 64: WIDE, 96: Tile(16, 8, 4, 8, 4), 128: WIDE, 512: VAST},
    "dkv": {32: SMALL, 64: WIDE, 96: Tile(16, 8, 4, 4, 4), 128: WIDE, 256: VAST, 512: Tile(8, 32, 4, 4, 4)},
}
PAIRS = "dkv_pairs"  # dkv from what dq left
TILES[PAIRS] = {32: SMALL, 128: WIDE, 512: Tile(8, 32, 4, 4, 4)}
# Few workgroups leave a large GPU idle. The backward then splits its sums: dkv handles each query head of a group
# separately, and dq and dkv visit only every second or fourth block per split. So the last bits of gradients (but
# nothing in the forward) depend on the capacity.
ENOUGH_FOR_GROUPS = 1024  # workgroups; below, dkv splits by query head
ENOUGH_WORKGROUPS = 512  # below, dq and dkv split by blocks
MAX_WALKS = 4


class Cut(NamedTuple):
    """The work of a workgroup: a tile of rows, a share of a group's query heads, one of several walks over blocks."""

    tile: Tile
    shares: int = 1
    walks: int = 1

    @property
    def parts(self) -> int:
        return self.shares * self.walks

    def grid(self, kernel: str, problem) -> tuple[int, int]:
        rows = problem.slots if kernel.startswith("dkv") else problem.rows * problem.group
        return problem.kv_heads * self.parts, -(-rows // self.tile.rows)


def cut_for(kernel: str, problem) -> Cut:
    cut = Cut(next(tile for largest, tile in TILES[kernel].items() if problem.head_dim <= largest))
    if kernel.startswith("dkv") and math.prod(cut.grid(kernel, problem)) < ENOUGH_FOR_GROUPS:
        cut = cut._replace(shares=problem.group)
    while kernel != "forward" and cut.walks < MAX_WALKS and math.prod(cut.grid(kernel, problem)) < ENOUGH_WORKGROUPS:
        cut = cut._replace(walks=2 * cut.walks)
    return cut


def span_of(problem, room: int, max_binding: int) -> int:
    """Keys of a row for which dq leaves (p, ds) to dkv; 0 if they do not fit into `room` elements and a binding."""
    if problem.softcap or problem.head_dim % 4:
        return 0
    span = padded(min(problem.reach, problem.longest) + 3, 4)  # it begins at a multiple of 4
    size = 2 * problem.rows * problem.heads * span
    return span if size <= min(room, max_binding // 4) else 0


def _record(plan, kernel, cut, problem, products, residues=0, options=None, span=0, **tensors):
    scale, softcap, windowed = problem.scale, problem.softcap, problem.reach < problem.slots
    params = {
        "rows": problem.rows,
        "slots": problem.slots,
        "row_ld": problem.row_ld,
        "slot_ld": problem.slot_ld,
        "heads": problem.heads,
        "splits": cut.parts,
        "walks": cut.walks,
        "residues": residues,
        "scale": scale,
        "scale2": (softcap or scale) / math.log(2),
    }
    if windowed:
        params["window"] = problem.reach
    if span:
        params["span"] = span
    if softcap:
        params["squash"] = scale / softcap
    template = {
        "head_dim": problem.head_dim,
        "group": problem.group // cut.shares,
        "software": plan.device.capabilities.software,
        "windowed": windowed,
        "capped": bool(softcap),
        "pairs": span > 0,
        **cut.tile._asdict(),
        **(options or {}),
    }
    plan.record(
        f"attention_flash_{kernel}",
        "main",
        (*cut.grid(kernel, problem), 2) if kernel == PAIRS else cut.grid(kernel, problem),
        params=params,
        template=template,
        flops=problem.flops(products),
        **tensors,
    )


def _parts(workspace, totals, cut):
    """Buffers for a kernel's partial sums of each of `totals`; the totals themselves if there is one split."""
    if cut.parts == 1:
        return totals
    return {name: workspace.take((cut.parts, *x.shape), "f32", f"parts of {name}") for name, x in totals.items()}


def _sum_parts(plan, workspace, totals, parts, cut, accumulate=False):
    for name, total in totals.items() if cut.parts > 1 else ():
        plan.record(
            "sum_parts",
            "forward",
            fold_elements(total.size),
            total=total,
            parts=parts[name],
            params={"count4": total.size // 4, "parts": cut.parts, "accumulate": accumulate},
        )
        workspace.give(parts[name])


def _stats(plan, stats, dout, out, lse, kv_start, problem):
    unit, element = (4, "vec4<f32>") if problem.head_dim % 4 == 0 else (1, "f32")
    sizes = {"rows": problem.rows, "heads": problem.heads}
    params = sizes | {"head": problem.head_dim // unit, "ld": problem.row_ld // unit}
    plan.record(
        "attention_stats",
        "forward",
        fold(-(-problem.rows * problem.heads // 16)),
        params=params,
        template={"element": element},
        stats=stats,
        dout=dout,
        out=out,
        lse=lse,
        kv_start=kv_start,
    )


def forward(plan, problem, workspace, *, out, lse, q, kcache, vcache, slot, kv_start):
    _record(
        plan,
        "forward",
        cut_for("forward", problem),
        problem,
        2,
        out=out,
        lse=lse,
        q=q,
        kcache=kcache,
        vcache=vcache,
        slot=slot,
        kv_start=kv_start,
    )


def backward(
    plan,
    problem,
    workspace,
    accumulate_kv,
    room,
    *,
    dq,
    dk,
    dv,
    dout,
    out,
    lse,
    q,
    kcache,
    vcache,
    slot,
    kv_start,
    segment_end,
):
    span = span_of(problem, room, plan.device.max_binding)
    last = PAIRS if span else "dkv"
    cut, cut_dkv = cut_for("dq", problem), cut_for(last, problem)
    stats = workspace.take((1 + cut.walks, problem.rows, problem.heads, 4), "u32", "attention stats")
    _stats(plan, stats, dout, out, lse, kv_start, problem)
    scores, left = {"kcache": kcache, "vcache": vcache}, {}
    if span:
        with workspace.reuse_only():
            left = {"pairs": workspace.take((problem.rows * problem.heads * span, 2), "f32", "attention pairs")}
    inputs = {"dout": dout, "q": q, "stats": stats, **left}
    totals = {"dq": dq}
    parts = _parts(workspace, totals, cut)
    _record(plan, "dq", cut, problem, 3, span=span, **parts, **inputs, **scores)
    _sum_parts(plan, workspace, totals, parts, cut)
    totals = {"dk": dk, "dv": dv}
    parts = _parts(workspace, totals, cut_dkv)
    inputs |= {"segment_end": segment_end} | ({} if span else scores)
    options = {"accumulate": accumulate_kv and cut_dkv.parts == 1}
    _record(plan, last, cut_dkv, problem, 2 if span else 4, cut.walks, options, span, **parts, **inputs)
    _sum_parts(plan, workspace, totals, parts, cut_dkv, accumulate_kv)
    workspace.give(stats, *left.values())
