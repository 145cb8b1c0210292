"""Attention of one new token per sequence by flash decoding, in one dispatch.

`attention_decode` also rotates q and k and appends to the cache; `attention_decode_prepared` takes what another kernel
rotated and appended. Equations: shaders/attention_decode.wgsl.j2. The kernel that reads the partial sums combines them
(ops/matvec.py).
"""

import math

from lorawgpu.gpu import padded
from lorawgpu.ops import decode_state as row_state
from lorawgpu.ops.attention import MAX_HEAD_DIM, check_options
from lorawgpu.ops.checks import expect

SPLITS = 32  # most workgroups that share a long sequence
KEYS = 64  # keys in a block, which is the shortest split
LANES = 256
MAX_HEADS = 4  # most query heads of a workgroup: their scores fill a vec4
MEMORY = 16384  # bytes of workgroup memory, WebGPU's default limit


def fits(head_dim: int) -> bool:
    """Whether heads of this size consist of vec4s that RoPE rotates in pairs."""
    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def parts_shape(rows: int, row_ld: int) -> tuple:
    return rows, SPLITS, row_ld


def stats_shape(rows: int, heads: int) -> tuple:
    return rows, SPLITS, heads, 4


def attention_decode(
    plan,
    parts,
    stats,
    kcache,
    vcache,
    qkv,
    table,
    rows,
    *,
    count,
    heads,
    kv_heads,
    head_dim,
    k_off,
    v_off,
    scale,
    window=None,
    softcap=None,
):
    """Write parts [count, SPLITS, row_ld] and stats [count, SPLITS, heads, 4] for the `count` sequences in `rows`.

    qkv [count, ld]; kcache, vcache [slots, slot_ld], to which k and v are appended; rows from
    ops.decode_state.rows_buffer; table from ops.rope.rope_table, as long as the longest sequence may become.
    `window`: the keys that a token sees at most, its own included. `softcap`: the bound of the scores.
    ValueError for an unsupported head size (see `fits`) or option, or a wrong shape.
    """
    expect("qkv", qkv, (count, qkv.shape[1]))
    params = {"ld4": qkv.shape[1] // 4, "k_off4": k_off // 4, "v_off4": v_off // 4, "positions": table.shape[0]}
    sizes = {"count": count, "longest": table.shape[0], "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    tensors = {"parts": parts, "stats": stats, "kcache": kcache, "vcache": vcache, "rows": rows}
    fused = {"qkv": qkv, "table": table}
    _record(plan, tensors, fused, params, scale=scale, window=window, softcap=softcap, **sizes)


def attention_decode_prepared(
    plan,
    parts,
    stats,
    kcache,
    vcache,
    q,
    rows,
    *,
    count,
    longest,
    heads,
    kv_heads,
    head_dim,
    scale,
    window=None,
    softcap=None,
):
    """The same for rotated q [count, padded(NH*HD)] and caches that hold the new tokens' k and v.

    `longest`: the tokens that the longest sequence may come to have. Other arguments as in `attention_decode`.
    """
    expect("q", q, (count, padded(heads * head_dim)))
    sizes = {"count": count, "longest": longest, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    tensors = {"parts": parts, "stats": stats, "kcache": kcache, "vcache": vcache, "rows": rows}
    _record(plan, tensors, {"q": q}, {}, scale=scale, window=window, softcap=softcap, **sizes)


def _heads_per_workgroup(group: int, head_dim: int, is_fused: bool) -> int:
    """The most query heads that divide a group and whose vectors fit into workgroup memory."""
    others = 16 * (LANES + KEYS + 1) + (8 * head_dim if is_fused else 0)  # bytes; if fused, the new k and v
    return max(n for n in range(1, MAX_HEADS + 1) if group % n == 0 and 4 * n * head_dim + others <= MEMORY)


def _record(plan, tensors, inputs, params, *, count, longest, heads, kv_heads, head_dim, scale, window, softcap):
    """One dispatch. `inputs` and `params` are those of its variant."""
    check_options(heads, kv_heads, head_dim, window, softcap)
    if not fits(head_dim):
        raise ValueError(f"attention_decode: head_dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
    row_ld, slot_ld = padded(heads * head_dim), padded(kv_heads * head_dim)
    shapes = {"parts": parts_shape(count, row_ld), "stats": stats_shape(count, heads), "kcache": (0, slot_ld)}
    for name, shape in (shapes | {"vcache": (0, slot_ld)}).items():
        expect(name, tensors[name], shape)
    group, is_fused = heads // kv_heads, "table" in inputs
    per_workgroup, reach = _heads_per_workgroup(group, head_dim, is_fused), min(window or longest, longest)
    params |= {"row_ld4": row_ld // 4, "slot_ld4": slot_ld // 4, "heads": heads, "splits": SPLITS}
    params["scale2"] = scale / softcap if softcap else scale * math.log2(math.e)
    if softcap:
        params["cap2"] = softcap * math.log2(math.e)
    if reach < longest:
        params["window"] = reach
    template = {
        "wg": LANES,
        "keys": KEYS,
        "kgs": min(KEYS, LANES * 4 // head_dim),
        "hd4": head_dim // 4,
        "group": group,
        "hpw": per_workgroup,
        "fused": is_fused,
        "windowed": reach < longest,
        "capped": bool(softcap),
        **row_state.template(),
    }
    grid = heads // per_workgroup, min(SPLITS, -(-reach // KEYS)), count
    plan.record("attention_decode", "main", grid, params=params, template=template, **tensors, **inputs)
