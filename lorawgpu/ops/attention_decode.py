"""Attention of one new token per sequence: RoPE, appending to the cache and flash decoding in one dispatch.

Equations: shaders/attention_decode.wgsl.j2. The kernel that reads the partial sums combines them (ops/matvec.py).
"""

import math

from lorawgpu.ops import decode_state as row_state
from lorawgpu.ops.attention import MAX_HEAD_DIM
from lorawgpu.ops.checks import expect

SPLITS = 32  # most workgroups that share a long sequence
KEYS = 64  # keys in a block, which is the shortest split
LANES = 256
MAX_HEADS = 4  # most query heads of a workgroup: their scores fill a vec4


def fits(head_dim: int) -> bool:
    """Whether heads of this size consist of vec4s that RoPE rotates in pairs."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def parts_shape(rows: int, row_ld: int) -> tuple:
    return rows, SPLITS, row_ld


def stats_shape(rows: int, heads: int) -> tuple:
    return rows, SPLITS, heads, 4


def attention_decode(
    plan, parts, stats, kcache, vcache, qkv, table, rows, *, count, heads, kv_heads, head_dim, k_off, v_off, scale
):
    """Write parts [count, SPLITS, row_ld] and stats [count, SPLITS, heads, 4] for the `count` sequences in `rows`.

    qkv [count, ld]; kcache, vcache [slots, slot_ld]; rows from ops.decode_state.rows_buffer; table from
    ops.rope.rope_table, as long as the longest sequence may become.
    ValueError for an unsupported head size (see `fits`).
    """
    if not fits(head_dim):
        raise ValueError(f"attention_decode: head_dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
    expect("qkv", qkv, (count, qkv.shape[1]))
    expect("stats", stats, stats_shape(count, heads))
    group = heads // kv_heads
    per_workgroup = max(n for n in range(1, MAX_HEADS + 1) if group % n == 0)
    params = {
        "ld4": qkv.shape[1] // 4,
        "k_off4": k_off // 4,
        "v_off4": v_off // 4,
        "row_ld4": parts.shape[2] // 4,
        "slot_ld4": kcache.shape[1] // 4,
        "heads": heads,
        "splits": SPLITS,
        "positions": table.shape[0],
        "scale2": scale * math.log2(math.e),
    }
    template = {
        "wg": LANES,
        "keys": KEYS,
        "kgs": min(KEYS, LANES * 4 // head_dim),
        "hd4": head_dim // 4,
        "group": group,
        "hpw": per_workgroup,
        **row_state.template(),
    }
    buffers = {"parts": parts, "stats": stats, "kcache": kcache, "vcache": vcache}
    plan.record(
        "attention_decode",
        "main",
        (heads // per_workgroup, min(SPLITS, -(-table.shape[0] // KEYS)), count),
        params=params,
        template=template,
        qkv=qkv,
        table=table,
        rows=rows,
        **buffers,
    )
