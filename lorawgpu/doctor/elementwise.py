"""Kernels that go over rows and elements, against their references. Each: (lab, sizes) -> results; see check.Case."""

import numpy as np

from lorawgpu.doctor.lab import normal, pad
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum, loss_value
from lorawgpu.ops.dropout import dropout_add, dropout_forward
from lorawgpu.ops.gate import gate_backward, gate_forward
from lorawgpu.ops.gather import gather_backward, gather_forward
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward
from lorawgpu.ops.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lorawgpu.ops.rope import rope_backward, rope_forward, rope_table
from lorawgpu.ops.step import pack_step, step_buffer
from lorawgpu.reference import activation, dropout, rope
from lorawgpu.reference import cross_entropy as loss_reference
from lorawgpu.reference import quantize as quantize_reference
from lorawgpu.reference import rmsnorm as norm_reference
from lorawgpu.reference.gather import gather_backward as scattered
from lorawgpu.weights.tensors import Dense

EPS = 1e-5
FRESH = [0, 0xFFFFFFFF] + 14 * [0]  # a state buffer that has seen nothing


def stored(values, dtype):
    """float32 `values` as a file holds them in bf16, f16 or f32."""
    halves = {"bf16": lambda v: (v.view(np.uint32) >> 16).astype(np.uint16), "f16": lambda v: v.astype(np.float16)}
    return Dense(halves.get(dtype, lambda v: v)(values), dtype)


def clear(lab, count):
    out = lab.output(count)
    lab.plan.clear(out.exact)
    return lambda: {"out": (out.value, np.zeros(count))}


def rmsnorm(lab, rows, width):
    x, dy, start = (normal(rows, width, seed=s) for s in range(3))
    weight = normal(width, seed=3)
    gx, gdy, gw = lab.padded(x), lab.padded(dy), lab.input(pad(weight[None])[0])
    y, rstd, dx, total = (
        lab.rows(rows, width),
        lab.output(rows),
        lab.rows(rows, width),
        lab.rows(rows, width, pad(start)),
    )
    shape = {"rows": rows, "width": width}
    rmsnorm_forward(lab.plan, y.tensor, rstd.tensor, gx, gw, eps=EPS, **shape)
    for out, accumulate in ((dx, False), (total, True)):
        rmsnorm_backward(lab.plan, out.tensor, gdy, gx, gw, rstd.tensor, accumulate=accumulate, **shape)

    def results():
        want, want_rstd = norm_reference.rmsnorm_forward(x.astype(np.float64), weight, EPS)
        want_dx = norm_reference.rmsnorm_backward(dy, x.astype(np.float64), weight, want_rstd)
        return {
            "y": (y.value, want),
            "rstd": (rstd.value, want_rstd),
            "dx": (dx.value, want_dx),
            "dx, added": (total.value, want_dx + start),
        }

    return results


def _quantised(lab, rows, width):
    return lab.output(rows, -(-width // 16) * 4, dtype="u32"), lab.output(rows, 2, dtype="u32")


def _codes(xq, qscale, values) -> dict:
    """Codes, 1/s and sums of codes against the float32 reference of `values`: all exact."""
    want, s = quantize_reference.quantize_forward(values)
    return {
        "codes": (xq.value.view(np.int8), want),
        "1/s": (qscale.value[:, 0].view(np.float32), np.float32(1) / s),
        "sums": (qscale.value[:, 1].view(np.int32), want.sum(-1, dtype=np.int32)),
    }


def quantize(lab, rows, width):
    x = normal(rows, width)
    x[0] = np.arange(width) % 128 - 63.5  # ties: max 127 makes s = 1
    x[0, 0] = 127
    xq, qscale = _quantised(lab, rows, width)
    state = lab.state()
    quantize_forward(
        lab.plan, xq.tensor, qscale.tensor, lab.padded(x), state.tensor, rows=rows, width=width, record_id=3
    )
    return lambda: _codes(xq, qscale, x) | {"state": (state.value, np.zeros(16))}


def rmsnorm_quantize(lab, what, rows, width):
    """`what`: codes, or codes "with rows". Without the rows a code may differ where a fraction is near a tie."""
    keep = what == "with rows"
    x, weight = normal(rows, width), normal(width, seed=1)
    y, rstd, (xq, qscale) = lab.rows(rows, width), lab.output(rows), _quantised(lab, rows, width)
    inputs = lab.padded(x), lab.input(pad(weight[None])[0]), lab.state().tensor
    outputs = y.tensor if keep else None, rstd.tensor, xq.tensor, qscale.tensor
    rmsnorm_quantize_forward(lab.plan, *outputs, *inputs, rows=rows, width=width, eps=EPS, record_id=0)

    def results():
        want, want_rstd = norm_reference.rmsnorm_forward(x.astype(np.float64), weight, EPS)
        found = {"rstd": (rstd.value, want_rstd)}
        if keep:
            return found | {"y": (y.value, want)} | _codes(xq, qscale, y.value[:, :width])
        codes, s = quantize_reference.quantize_forward(want)
        near_tie = np.abs(np.abs(want * s[:, None]) % 1 - 0.5) < 1e-4
        wrong = (xq.value.view(np.int8)[:, :width] != codes) & ~near_tie
        return found | {"codes": (wrong, np.zeros(codes.shape)), "1/s": (qscale.value[:, 0].view(np.float32), 1 / s)}

    return results


def rotary(lab, rows, heads, kv_heads, head_dim):
    Q, KV = heads * head_dim, kv_heads * head_dim
    k_off, slots = pad(np.zeros((1, Q))).shape[1], rows + 2
    v_off = k_off + pad(np.zeros((1, KV))).shape[1]
    ld = v_off + v_off - k_off
    slot, position = np.arange(rows, dtype=np.int32)[::-1] + 2, np.arange(rows, dtype=np.int32) * 37
    frequencies = rope.rope_inv_freq(10000.0, head_dim)
    qkv, dq, dk, dv = normal(rows, ld), normal(rows, Q, seed=1), normal(slots, KV, seed=2), normal(slots, KV, seed=3)
    q, dqkv = lab.rows(rows, Q), lab.output(rows, ld)
    k, v = (lab.output(slots, v_off - k_off, initial=np.zeros((slots, v_off - k_off))) for _ in "kv")
    tables = lab.input(position), lab.input(slot), lab.input(rope_table(frequencies, 37 * rows))
    sizes = {"rows": rows, "n_heads": heads, "n_kv_heads": kv_heads, "k_off": k_off, "v_off": v_off}
    rope_forward(lab.plan, q.tensor, k.exact, v.exact, lab.input(qkv), *tables, **sizes)
    rope_backward(lab.plan, dqkv.tensor, lab.padded(dq), lab.padded(dk), lab.padded(dv), *tables, **sizes)

    def results():
        cos, sin = rope.rope_tables(position, frequencies)
        want_k, want_v, want = np.zeros((slots, KV)), np.zeros((slots, KV)), np.zeros((rows, ld))
        want_k[slot], want_v[slot] = rope.rope_forward(qkv[:, k_off : k_off + KV], cos, sin), qkv[:, v_off : v_off + KV]
        want[:, :Q] = rope.rope_backward(dq, cos, sin)
        want[:, k_off : k_off + KV] = rope.rope_backward(dk[slot], cos, sin)
        want[:, v_off : v_off + KV] = dv[slot]
        want_q = rope.rope_forward(qkv[:, :Q], cos, sin)
        return {"q": (q.value, want_q), "k": (k.value, want_k), "v": (v.value, want_v), "dqkv": (dqkv.value, want)}

    return results


def gate(lab, act, rows, width):
    g, u, dm = 4 * normal(rows, width), normal(rows, width, seed=1), normal(rows, width, seed=2)
    gu = lab.input(np.concatenate([pad(g), pad(u)], axis=1))
    m, dgu, state = lab.rows(rows, width), lab.output(rows, gu.shape[1]), lab.state()
    shape = {"rows": rows, "width": width, "act": act}
    gate_forward(lab.plan, m.tensor, gu, state.tensor, record_id=0, **shape)
    gate_backward(lab.plan, dgu.tensor, lab.padded(dm), gu, **shape)

    def results():
        dg, du = activation.gate_backward(dm, g.astype(np.float64), u, act)
        half = dgu.value.shape[1] // 2
        return {
            "m": (m.value, activation.gate_forward(g.astype(np.float64), u, act)),
            "dg": (dgu.value[:, :half], dg),
            "du": (dgu.value[:, half:], du),
            "state": (state.value, np.zeros(16)),
        }

    return results


def gather(lab, rows, width):
    """Every second row has a target, the last of them none."""
    index = np.arange(0, rows, 2, dtype=np.int32)
    ids = np.where(np.arange(len(index)) < len(index) - 1, index, -1).astype(np.int32)
    x, dy = normal(rows, width), normal(len(index), width, seed=1)
    y, dx = lab.rows(len(index), width), lab.rows(rows, width, np.zeros(pad(x).shape))
    lists, shape = (lab.input(index), lab.input(ids)), {"start": 0, "rows": len(index), "width": width}
    gather_forward(lab.plan, y.tensor, lab.padded(x), *lists, **shape)
    gather_backward(lab.plan, dx.exact, lab.padded(dy), *lists, **shape)
    used = (ids >= 0)[:, None]
    return lambda: {"y": (y.value, x[index] * used), "dx": (dx.value, scattered(dy * used, index, rows))}


def adapter_dropout(lab, rows, width):
    p, key, x, start = 0.3, dropout.dropout_step_key(7, 3, 1), normal(rows, width), normal(rows, width, seed=1)
    step = step_buffer(lab.device)
    lab.device.write(step, pack_step(key=key))
    y, total = lab.rows(rows, width), lab.rows(rows, width, pad(start))
    at = {"layer": 2, "module": "v_proj", "rows": rows, "width": width, "p": p}
    dropout_forward(lab.plan, y.tensor, lab.padded(x), step, **at)
    dropout_add(lab.plan, total.tensor, lab.padded(x), step, **at)
    want = x * dropout.dropout_mask(key, 2, dropout.MODULES.index("v_proj"), rows, width, p) / (1 - p)
    return lambda: {"y": (y.value, want), "added": (total.value, start + want)}


def cross_entropy(lab, rows, vocab):
    """The last row has no target."""
    logits, ids = 5 * normal(rows, vocab), np.arange(rows, dtype=np.int32) * 7 % vocab
    ids[-1] = -1
    state = lab.output(16, initial=FRESH, dtype="u32")
    losses, plain, gids = lab.output(rows), lab.output(rows), lab.input(ids)
    dlogits, total = lab.rows(rows, vocab, pad(logits)), lab.output(2, initial=np.zeros(2), dtype="u32")
    shape = {"start": 0, "rows": rows, "vocab": vocab, "record_id": 0}
    cross_entropy_forward(lab.plan, plain.exact, lab.padded(logits), gids, state.tensor, **shape)
    cross_entropy_forward_backward(lab.plan, losses.exact, dlogits.tensor, gids, state.tensor, **shape)
    loss_sum(lab.plan, total.exact, losses.exact, start=0, rows=rows)

    def results():
        x = logits[:-1].astype(np.float64)
        loss, lse = loss_reference.cross_entropy_forward(x, ids[:-1])
        grad = loss_reference.cross_entropy_backward(x, ids[:-1], lse)
        return {
            "losses": (losses.value, np.append(loss, 0)),
            "losses alone": (plain.value, np.append(loss, 0)),
            "dlogits": (dlogits.value, np.vstack([grad, np.zeros(vocab)])),
            "sum": (np.array([loss_value(total.value)]), loss.sum(keepdims=True)),
            "state": (state.value != np.array(FRESH, np.uint32), np.zeros(16)),
        }

    return results
