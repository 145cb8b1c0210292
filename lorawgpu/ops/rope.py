"""Rotary embedding of q and k, and storing k and v in the cache. Equations and layout: shaders/rope.wgsl.j2."""

import numpy as np

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import WG, expect, fold


def rope_table(inv_freq: np.ndarray, positions: int) -> np.ndarray:
    """cos, then sin, of position * inv_freq: float32 [positions, HD], computed in float64.

    inv_freq: float64 [HD/2], scaling included (`Rope.inv_freq`).
    """
    angle = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(inv_freq, np.float64)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rope_forward(plan, q, kcache, vcache, qkv, position, slot, table, *, rows, n_heads, n_kv_heads, k_off, v_off):
    """q [rows, NH*HD] = rope(q of qkv); row slot[t] of kcache, vcache [cache_rows, NKV*HD] = rope(k), v of token t.

    qkv [rows, ld], with k from column k_off and v from column v_off; position, slot i32 [rows]; table [positions, HD]
    from `rope_table`, longer than any position. A slot outside the cache is not written.
    """
    params = _params(q, kcache, vcache, qkv, position, slot, table, rows, n_heads, n_kv_heads, k_off, v_off)
    _record(
        plan,
        "forward",
        params,
        params["ldq"] + 2 * params["ldkv"],
        table,
        position=position,
        slot=slot,
        qkv=qkv,
        q=q,
        kcache=kcache,
        vcache=vcache,
    )


def rope_backward(plan, dqkv, dq, dk, dv, position, slot, table, *, rows, n_heads, n_kv_heads, k_off, v_off):
    """dqkv [rows, ld] = inverse rope of dq [rows, NH*HD] and of row slot[t] of dk; row slot[t] of dv unchanged."""
    params = _params(dq, dk, dv, dqkv, position, slot, table, rows, n_heads, n_kv_heads, k_off, v_off)
    _record(plan, "backward", params, params["ld"], table, position=position, slot=slot, dq=dq, dk=dk, dv=dv, dqkv=dqkv)


SIZES = ("ld", "Q", "KV", "k_off", "v_off", "ldq", "ldkv")


def _record(plan, entry, params, columns, table, **tensors):
    half = table.shape[1] // 2
    wide = all(n % 4 == 0 for n in (half, *(params[name] for name in SIZES)))
    unit = 4 if wide else 1
    blocks = -(-columns // (unit * WG))
    plan.record(
        "rope",
        entry,
        fold(params["rows"] * blocks),
        params=params | {name: params[name] // unit for name in SIZES} | {"blocks": blocks},
        overrides={"HALF": half // unit},
        template={"element": "vec4<f32>" if wide else "f32"},
        table=table,
        **tensors,
    )


def _params(q, k, v, qkv, position, slot, table, rows, n_heads, n_kv_heads, k_off, v_off) -> dict:
    head_dim = table.shape[1]
    Q, KV = n_heads * head_dim, n_kv_heads * head_dim
    ld = qkv.shape[1]
    expect("q", q, (rows, padded(Q)))
    expect("k", k, (0, padded(KV)))
    expect("v", v, (k.shape[0], padded(KV)))
    expect("qkv", qkv, (rows, ld))
    expect("position", position, (rows,), "i32")
    expect("slot", slot, (rows,), "i32")
    expect("table", table, (1, head_dim))
    if head_dim % 2 or not Q <= k_off <= k_off + KV <= v_off <= v_off + KV <= ld:
        raise ValueError(
            f"qkv ({qkv.label}): {ld} columns do not hold q [0, {Q}), k [{k_off}, +{KV}) and v [{v_off}, "
            f"+{KV}) of even heads ({head_dim}) one after another"
        )
    return {
        "rows": rows,
        "ld": ld,
        "Q": Q,
        "KV": KV,
        "k_off": k_off,
        "v_off": v_off,
        "ldq": padded(Q),
        "ldkv": padded(KV),
        "cache_rows": k.shape[0],
        "positions": table.shape[0],
    }
