"""The check of what happens between fused projection and attention: (lab, variant, sizes) -> results; see check.py."""

import numpy as np

from lorawgpu.doctor.check import differing
from lorawgpu.doctor.lab import normal, pad
from lorawgpu.gpu import padded
from lorawgpu.ops.rope import Heads, head_constants, rope_backward, rope_forward, rope_table
from lorawgpu.reference import rope as reference

THETA, EPS, FACTOR = 10000.0, 1e-3, 1.3  # an eps that shows in the result; a factor as of YaRN

# Options of Heads by variant. rot: the part of a head that rotates. tight: no padding between q, k and v. values:
# whether they have columns of their own in qkv. keys: whether the layer has keys and values at all.
VARIANTS = {
    "plain": {},
    "tight": {"tight": True},
    "unrotated": {"rot": 0},
    "partial": {"rot": 0.5, "tight": True},
    "biased": {"bias": True},
    "scaled values": {"v_scale": 0.3},
    "scaled queries": {"q_table": True},
    "scaled queries, normed": {"q_table": True, "bias": True, "norm": "head"},
    "normed": {"norm": "head"},
    "normed rows": {"norm": "row"},
    "normed values": {"norm": "head", "v_norm": True},
    "values from keys": {"norm": "head", "v_norm": True, "values": False},
    "queries only": {"norm": "head", "v_norm": True, "keys": False},
    "plain queries only": {"keys": False},
    "only values normed": {"v_norm": True, "bias": True, "values": False},
    "raw values from normed keys": {"norm": "head", "values": False, "v_scale": 0.3},
    "plain values from keys": {"values": False},
    "everything": {"rot": 0.5, "bias": True, "norm": "head", "v_norm": True, "v_scale": 0.3},
    "everything, whole rows": {"rot": 0.5, "bias": True, "norm": "row", "v_scale": 0.3, "tight": True},
}


def layout(variant: str, heads: int, kv_heads: int, head_dim: int) -> tuple[Heads, int]:
    """The Heads of a variant, and the row stride of its qkv."""
    options = {"rot": 1, "tight": False, "values": True, "keys": True} | VARIANTS[variant]
    tight, keys, values = (options.pop(name) for name in ("tight", "keys", "values"))
    Q, KV = (n * head_dim if tight else padded(n * head_dim) for n in (heads, kv_heads))
    k_off, v_off = Q if keys else None, Q + KV if keys and values else None
    rot = int(options.pop("rot") * head_dim) // 2 * 2
    made = Heads(heads, kv_heads * keys, head_dim, rot, k_off, v_off, eps=EPS, **options)
    return made, padded(Q + keys * (1 + values) * KV)


def parts(h: Heads, tables: dict) -> dict:
    """Name -> (columns in qkv, keywords of reference.heads_forward), with random constants. tables: of q and of k."""
    found = {"q": (0, h.q_width)}
    if h.kv_heads:
        found |= {"k": (h.k_off, h.kv_width), "v": (h.k_off if h.v_off is None else h.v_off, h.kv_width)}
    made = {}
    for name, (start, width) in found.items():
        options = {"eps": h.eps, "bias": normal(width, seed=start) if h.bias else 0.0}  # one bias, if v is from k
        if name == "v":
            options |= {"scale": h.v_scale, "weight": np.ones(h.head_dim) if h.v_norm else None}
        else:
            width = width if h.norm == "row" else h.head_dim
            options |= {"tables": tables[name], "weight": normal(width, seed=ord(name)) if h.norm else None}
        made[name] = slice(start, start + found[name][1]), options
    return made


def rotary(lab, variant, rows, heads, kv_heads, head_dim, first, slots, gain=1.0):
    """Rows in descending order into a cache of `slots`, the last row into slot `first`; slots outside are dropped.

    gain: the magnitude of qkv.
    """
    h, ld = layout(variant, heads, kv_heads, head_dim)
    slot, position = np.arange(rows, dtype=np.int32)[::-1] + first, np.arange(rows, dtype=np.int32) * 37 % 4096
    frequencies = reference.rope_inv_freq(THETA, h.rot) if h.rot else np.zeros(0)
    q_scale = 1 + np.arange(4096) / 4096 if h.q_table else np.ones(4096)
    turned = tuple(FACTOR * t for t in reference.rope_tables(position, frequencies)) if h.rot else None
    pieces = parts(h, {"q": turned and [q_scale[position][:, None] * t for t in turned], "k": turned})
    qkv, dq, old = gain * normal(rows, ld), normal(rows, h.q_width, seed=1), normal(slots, padded(h.kv_width), seed=4)
    grads = {"q": dq} | {name: normal(slots, h.kv_width, seed=i) for i, name in ((2, "k"), (3, "v")) if name in pieces}
    outputs = {"q": lab.rows(rows, h.q_width)}
    outputs |= {name: lab.output(*old.shape, initial=old) for name in "kv" if name in pieces}
    dqkv = lab.output(rows, ld)

    constants = None
    if h.constant_rows:
        weights = {f"{n}_norm": o["weight"] for n, (_, o) in pieces.items() if n != "v" and h.norm}
        own = [o["bias"] for n, (_, o) in pieces.items() if n != "v" or h.v_off is not None]
        constants = lab.input(head_constants(h, ld, **weights, bias=own))
    positions = max(position) + 1
    own = q_scale[:positions] if h.q_table else None
    table = lab.input(rope_table(frequencies, positions, FACTOR, own)) if h.rot else None
    index = lab.input(position), lab.input(slot), table
    gx, sizes = lab.input(qkv), {"rows": rows, "heads": h, "constants": constants}
    k, v = (outputs[name].exact if name in outputs else None for name in "kv")
    rope_forward(lab.plan, outputs["q"].tensor, k, v, gx, *index, **sizes)
    dk, dv = (lab.padded(grads[name]) if name in grads else None for name in "kv")
    rope_backward(lab.plan, dqkv.tensor, lab.padded(dq), dk, dv, *index, qkv=gx, **sizes)

    def results():
        inside = (slot >= 0) & (slot < slots)
        at, others = slot[inside], np.setdiff1d(np.arange(slots), slot)
        found, want = {}, np.zeros((rows, ld))
        for name, (columns, options) in pieces.items():
            x, dy = qkv[:, columns].astype(np.float64), grads[name].astype(np.float64)
            y = reference.heads_forward(x, head_dim, **options)
            if name == "q":
                found["q"] = outputs["q"].value, y
            else:
                dy = np.where(inside[:, None], dy[np.clip(slot, 0, slots - 1)], 0.0)
                got = outputs[name].value[at]
                copied = variant == "plain" and name == "v"
                found[name] = differing(got, pad(qkv[:, columns])[inside]) if copied else (got, y[inside])
                found[f"{name} of other slots"] = differing(outputs[name].value[others], old[others])
            want[:, columns] += reference.heads_backward(dy, x, head_dim, **options)
        return found | {"dqkv": (dqkv.value, want)}

    return results
