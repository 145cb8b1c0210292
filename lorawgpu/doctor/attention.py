"""Attention kernels against the float64 reference. Each: (lab, what, sizes) -> results; see check.py."""

import numpy as np

from lorawgpu.doctor.lab import NanScratch, normal, pad
from lorawgpu.gpu import padded
from lorawgpu.ops.attention import attention_backward, attention_forward, log_sum_exp
from lorawgpu.ops.attention_decode import attention_decode, parts_shape, stats_shape
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.rope import rope_table
from lorawgpu.reference import attention as reference
from lorawgpu.reference import rope

THETA = 10000.0


def flat_sequences(lengths):
    """slot, kv_start and segment_end of sequences one after another."""
    starts = np.cumsum([0, *lengths])
    rows = [np.repeat(edge, lengths).astype(np.uint32) for edge in (starts[:-1], starts[1:])]
    return np.arange(starts[-1], dtype=np.uint32), *rows


def attention(lab, impl, heads, kv_heads, head_dim, *lengths):
    """Forward and backward of sequences of these lengths."""
    slot, kv_start, segment_end = flat_sequences(lengths)
    rows, q_width, kv_width = len(slot), heads * head_dim, kv_heads * head_dim
    q, dout = normal(rows, q_width), normal(rows, q_width, seed=1)
    k, v = normal(rows, kv_width, seed=2), normal(rows, kv_width, seed=3)
    outputs = {"out": lab.rows(rows, q_width), "lse": lab.output(rows, 2 * heads), "dq": lab.rows(rows, q_width)}
    outputs |= {name: lab.rows(rows, kv_width) for name in ("dk", "dv")}
    out, lse, dq, dk, dv = (o.exact for o in outputs.values())
    gq, gk, gv, gdout = (lab.padded(x) for x in (q, k, v, dout))
    gslot, gstart, gend = (lab.input(x) for x in (slot, kv_start, segment_end))
    scale = head_dim**-0.5
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": scale, "impl": impl}
    sizes |= {"workspace": NanScratch(lab.device)}
    attention_forward(lab.plan, out, lse, gq, gk, gv, gslot, gstart, **sizes)
    attention_backward(lab.plan, dq, dk, dv, gdout, out, lse, gq, gk, gv, gslot, gstart, gend, **sizes)

    def results():
        x64 = [x.astype(np.float64) for x in (q, k, v)]
        shape = slot, kv_start, heads, kv_heads, scale
        want, want_lse = reference.attention_forward(*x64, *shape)
        grads = reference.attention_backward(dout.astype(np.float64), *x64, want, want_lse, *shape)
        wanted = want, want_lse.T, *grads
        got = {name: made.value for name, made in outputs.items()} | {"lse": log_sum_exp(outputs["lse"].value)}
        return {name: (value, x) for (name, value), x in zip(got.items(), wanted, strict=True)}

    return results


def _combined(parts, stats, heads, head_dim):
    """What matvec_input.wgsl makes of the parts of one row."""
    used = int(stats[0, 0, 2])
    weight = np.exp2(stats[:used, :, 0] - stats[:used, :, 0].max(0))
    values = parts[:used, : heads * head_dim].reshape(used, heads, head_dim)
    return ((weight[..., None] * values).sum(0) / (weight * stats[:used, :, 1]).sum(0)[:, None]).ravel()


def decode(lab, heads, kv_heads, head_dim, *lengths):
    """One new token of each sequence; `lengths` count it."""
    rows, span = len(lengths), padded(max(lengths), 64)
    q_width, width = heads * head_dim, kv_heads * head_dim
    q_ld, kv_ld, scale = padded(q_width), padded(width), head_dim**-0.5
    position, first = np.array(lengths) - 1, np.arange(rows) * span
    qkv, cache = normal(rows, q_ld + 2 * kv_ld), normal(2, rows * span, width)
    state = np.zeros((len(FIELDS), STRIDE), np.int32)
    for name, values in (("position", position), ("slot", first + position), ("kv_start", first)):
        state[FIELDS.index(name), :rows] = values
    parts, stats = lab.output(*parts_shape(rows, q_ld)), lab.output(*stats_shape(rows, heads))
    k, v = (lab.output(rows * span, kv_ld, initial=pad(c)) for c in cache)
    frequencies = rope.rope_inv_freq(THETA, head_dim)
    inputs = lab.input(qkv), lab.input(rope_table(frequencies, max(lengths))), lab.input(state)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "k_off": q_ld, "v_off": q_ld + kv_ld}
    tensors = (t.tensor for t in (parts, stats, k, v))
    attention_decode(lab.plan, *tensors, *inputs, count=rows, scale=scale, **sizes)

    def results():
        tables = rope.rope_tables(position, frequencies)
        q = rope.rope_forward(qkv[:, :q_width].astype(np.float64), *tables)
        want_k, want_v = cache.astype(np.float64)
        want_k[first + position] = rope.rope_forward(qkv[:, q_ld : q_ld + width], *tables)
        want_v[first + position] = qkv[:, q_ld + kv_ld : q_ld + kv_ld + width]
        want, _ = reference.attention_forward(q, want_k, want_v, first + position, first, heads, kv_heads, scale)
        got = [
            _combined(p.astype(np.float64), s, heads, head_dim) for p, s in zip(parts.value, stats.value, strict=True)
        ]
        return {"out": (np.stack(got), want), "k": (k.value, want_k), "v": (v.value, want_v)}

    return results
