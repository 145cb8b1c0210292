"""Flash attention: nothing of size rows x slots is stored.

Equations and what is guaranteed: shaders/attention_flash_*.wgsl.j2; tiles: shaders/common/flash_products.wgsl.j2.
`sizes` is an ops.attention.Sizes; shapes are checked there. The backward is two passes, dq, then dk and dv.
"""
import math
from typing import NamedTuple

from .checks import fold, fold_elements


class Tile(NamedTuple):
    """How a workgroup cuts its products; the template's names.

    ty x tx threads (powers of two, from 4 x 8 on); rt rows and ct columns (multiples of 4) a thread; kc vec4s of depth
    held in workgroup memory (divides tx and ty).
    """

    ty: int
    tx: int
    rt: int
    ct: int
    kc: int

    @property
    def rows(self) -> int:
        return self.ty * self.rt


SMALL = Tile(8, 8, 4, 4, 4)  # quick to compile: the models of the tests
WIDE = Tile(8, 16, 8, 4, 4)
HUGE = Tile(8, 32, 8, 4, 2)
# Largest head_dim -> tile, by kernel. A thread holds rt x ct scores (twice in the backward) and rt x head_dim/tx
# sums (twice in dkv); 255 registers and 16 KiB are the walls.
TILES = {
    "forward": {32: SMALL, 64: Tile(16, 8, 8, 8, 4), 96: Tile(16, 8, 4, 8, 4), 128: WIDE, 256: HUGE},
    "dq": {32: SMALL, 64: WIDE, 96: Tile(16, 8, 4, 8, 4), 128: WIDE, 256: HUGE},
    "dkv": {32: SMALL, 64: WIDE, 96: Tile(16, 8, 4, 4, 4), 128: WIDE, 256: HUGE},
}
# Fewer workgroups than this leave a large card idle: dkv then sums each query head of a group apart, and their parts
# after. So the last bits of dk and dv (not of anything in the forward) depend on the capacity.
ENOUGH_WORKGROUPS = 1024


def tile_for(kernel: str, head_dim: int) -> Tile:
    return next(tile for largest, tile in TILES[kernel].items() if head_dim <= largest)


def splits_for(sizes) -> int:
    """Parts that dkv sums separately: 1, or one a query head of the group."""
    tiles = -(-sizes.slots // tile_for("dkv", sizes.head_dim).rows)
    return 1 if tiles * sizes.kv_heads >= ENOUGH_WORKGROUPS else sizes.group


def _record(plan, kernel, sizes, scale, products, splits=1, **tensors):
    tile, group = tile_for(kernel, sizes.head_dim), sizes.group // splits
    rows = sizes.slots if kernel == "dkv" else sizes.rows * group
    params = {"rows": sizes.rows, "slots": sizes.slots, "row_ld": sizes.row_ld, "slot_ld": sizes.slot_ld,
              "heads": sizes.heads, "splits": splits, "scale": scale, "scale2": scale / math.log(2)}
    template = {"head_dim": sizes.head_dim, "group": group, "software": plan.device.is_cpu, **tile._asdict()}
    plan.record(f"attention_flash_{kernel}", "main", (sizes.kv_heads * splits, -(-rows // tile.rows)), params=params,
                template=template, flops=sizes.flops(products), **tensors)


def _sum_parts(plan, total, parts, splits):
    plan.record("sum_parts", "forward", fold_elements(total.size), total=total, parts=parts,
                params={"count4": total.size // 4, "parts": splits})


def _stats(plan, stats, dout, out, lse, kv_start, sizes):
    unit, element = (4, "vec4<f32>") if sizes.head_dim % 4 == 0 else (1, "f32")
    params = {"rows": sizes.rows, "heads": sizes.heads, "head": sizes.head_dim // unit, "ld": sizes.row_ld // unit}
    plan.record("attention_stats", "forward", fold(-(-sizes.rows * sizes.heads // 16)), params=params,
                template={"element": element}, stats=stats, dout=dout, out=out, lse=lse, kv_start=kv_start)


def forward(plan, out, lse, q, kcache, vcache, slot, kv_start, sizes, scale, workspace):
    _record(plan, "forward", sizes, scale, 2, out=out, lse=lse, q=q, kcache=kcache, vcache=vcache,
            slot=slot, kv_start=kv_start)


def backward(plan, dq, dk, dv, dout, out, lse, q, kcache, vcache, slot, kv_start, segment_end, sizes, scale, workspace):
    stats = workspace.take((sizes.rows, sizes.heads, 4), "u32", "attention stats")
    _stats(plan, stats, dout, out, lse, kv_start, sizes)
    inputs = {"dout": dout, "q": q, "kcache": kcache, "vcache": vcache, "stats": stats}
    _record(plan, "dq", sizes, scale, 3, dq=dq, **inputs)
    splits = splits_for(sizes)
    parts = [dk, dv] if splits == 1 else [
        workspace.take((splits, *dk.shape), "f32", f"parts of {name}") for name in ("dk", "dv")]
    _record(plan, "dkv", sizes, scale, 4, splits, dk=parts[0], dv=parts[1], segment_end=segment_end,
            **inputs)
    if splits > 1:
        for total, part in zip((dk, dv), parts, strict=True):
            _sum_parts(plan, total, part, splits)
            workspace.give(part)
    workspace.give(stats)
