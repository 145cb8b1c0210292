"""Checks of row-wise and element-wise kernels against their references: (lab, sizes) -> results; see check.py."""

import numpy as np

from lorawgpu.doctor.check import differing
from lorawgpu.doctor.lab import POISON, normal, pad
from lorawgpu.gpu import Tensor, padded
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum, loss_value
from lorawgpu.ops.dropout import dropout_add, dropout_forward
from lorawgpu.ops.gate import gate_backward, gate_forward
from lorawgpu.ops.gather import gather_backward, gather_forward
from lorawgpu.ops.per_layer import per_layer_forward
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward
from lorawgpu.ops.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lorawgpu.ops.scale import scale_forward
from lorawgpu.ops.softcap import softcap_forward
from lorawgpu.ops.step import pack_step, step_buffer
from lorawgpu.reference import cross_entropy as loss_reference
from lorawgpu.reference import dropout
from lorawgpu.reference import gate as gate_reference
from lorawgpu.reference import gather as gather_reference
from lorawgpu.reference import per_layer as per_layer_reference
from lorawgpu.reference import quantize as quantize_reference
from lorawgpu.reference import rmsnorm as norm_reference
from lorawgpu.reference import softcap as cap_reference
from lorawgpu.weights.tensors import Dense

EPS = 1e-5
FRESH = [0, 0xFFFFFFFF] + 14 * [0]  # an unused state buffer


def stored(values, dtype):
    """float32 `values` as a file stores them in bf16, f16 or f32."""
    halves = {"bf16": lambda v: (v.view(np.uint32) >> 16).astype(np.uint16), "f16": lambda v: v.astype(np.float16)}
    return Dense(halves.get(dtype, lambda v: v)(values), dtype)


def clear(lab, count):
    out = lab.output(count)
    lab.plan.clear(out.exact)
    return lambda: {"out": (out.value, np.zeros(count))}


def rmsnorm(lab, rows, width, out_scale=1.0, gain=3.0):
    """`out_scale` multiplies the sum with a residual, and its gradient first. `gain`: the magnitude of x."""
    x, dy, start = gain * normal(rows, width), normal(rows, width, seed=1), normal(rows, width, seed=2)
    weight = normal(width, seed=3)
    gx, gdy, gw = lab.padded(x), lab.padded(dy), lab.input(pad(weight[None])[0])
    y, rstd, added = lab.rows(rows, width), lab.output(rows), lab.rows(rows, width)
    dx, total, scaled = (lab.rows(rows, width, pad(initial)) for initial in (start, start, dy))
    shape = {"rows": rows, "width": width}
    rmsnorm_forward(lab.plan, y.tensor, rstd.tensor, gx, gw, eps=EPS, **shape)
    rmsnorm_forward(lab.plan, added.tensor, rstd.tensor, gx, gw, eps=EPS, residual=gdy, out_scale=out_scale, **shape)
    scale_forward(lab.plan, scaled.tensor, scale=out_scale, **shape)
    for out, accumulate in ((dx, False), (total, True)):
        rmsnorm_backward(lab.plan, out.tensor, scaled.tensor, gx, gw, rstd.tensor, accumulate=accumulate, **shape)

    def results():
        exact = x.astype(np.float64)
        want, want_rstd = norm_reference.rmsnorm_add_forward(dy, exact, weight, EPS, out_scale)
        want_scaled, want_dx = norm_reference.rmsnorm_add_backward(dy, exact, weight, want_rstd, out_scale)
        return {
            "y": (y.value, norm_reference.rmsnorm_forward(exact, weight, EPS)[0]),
            "y plus residual": (added.value, want),
            "rstd": (rstd.value, want_rstd),
            "dresidual": (scaled.value, want_scaled),
            "dx": (dx.value, want_dx),
            "dx, accumulated": (total.value, want_dx + start),
        }

    return results


def _quantized_outputs(lab, rows, width):
    return lab.output(rows, padded(width) // 4, dtype="u32"), lab.output(rows, 2, dtype="u32")


def _codes(xq, qscale, values) -> dict:
    """Codes, 1/s and sums of codes against the float32 reference for `values`: all exact."""
    want, s = quantize_reference.quantize_forward(values)
    return {
        "codes": (xq.value.view(np.int8), want),
        "1/s": differing(qscale.value[:, 0].view(np.float32), np.float32(1) / s),
        "sums": (qscale.value[:, 1].view(np.int32), want.sum(-1, dtype=np.int32)),
    }


def quantize(lab, rows, width):
    """Rows of very different magnitudes; the last has ties (max 127, so s = 1), and of three or more one is zero."""
    x = normal(rows, width) * 10.0 ** (np.arange(rows) % 12 - 6)[:, None].astype(np.float32)
    if rows > 2:
        x[-2] = 0
    x[-1] = np.arange(width) % 128 - 63.5
    x[-1, 0] = 127
    xq, qscale = _quantized_outputs(lab, rows, width)
    state, shape = lab.state(), {"rows": rows, "width": width, "record_id": 3}
    quantize_forward(lab.plan, xq.tensor, qscale.tensor, lab.padded(x), state.tensor, **shape)
    return lambda: _codes(xq, qscale, x) | {"state": (state.value, np.zeros(16))}


def rmsnorm_quantize(lab, variant, rows, width):
    """`variant`: "codes", or codes "with rows". Without the rows, a code near a tie may differ."""
    keep = variant == "with rows"
    x, weight = 50 * normal(rows, width), normal(width, seed=1)
    y, rstd, (xq, qscale), state = (
        lab.rows(rows, width),
        lab.output(rows),
        _quantized_outputs(lab, rows, width),
        lab.state(),
    )
    inputs = lab.padded(x), lab.input(pad(weight[None])[0]), state.tensor
    outputs = y.tensor if keep else None, rstd.tensor, xq.tensor, qscale.tensor
    rmsnorm_quantize_forward(lab.plan, *outputs, *inputs, rows=rows, width=width, eps=EPS, record_id=0)

    def results():
        want, want_rstd = norm_reference.rmsnorm_forward(x.astype(np.float64), weight, EPS)
        codes, s = quantize_reference.quantize_forward(want)
        near_tie = np.abs(np.abs(want * s[:, None]) % 1 - 0.5) < 1e-4
        off = (xq.value.view(np.int8)[:, :width] != codes) & ~near_tie
        found = {
            "rstd": (rstd.value, want_rstd),
            "codes far from a tie": (off, np.zeros(codes.shape)),
            "scale": (qscale.value[:, 0].view(np.float32), 1 / s),
            "state": (state.value, np.zeros(16)),
        }
        return found | ({"y": (y.value, want)} | _codes(xq, qscale, y.value[:, :width]) if keep else {})

    return results


def per_layer(lab, dtype, rows, width, gain=3.0):
    """`gain`: the magnitude of the projection."""
    proj, weight, scale = gain * normal(rows, width), normal(width, seed=1), 0.125
    table, y = stored(pad(normal(rows, width, seed=2)), dtype), lab.rows(rows, width)
    inputs = lab.padded(proj), lab.input(table.data, dtype), lab.input(pad(weight[None])[0])
    shape = {"rows": rows, "width": width, "scale": scale, "eps": EPS}
    per_layer_forward(lab.plan, y.tensor, *inputs, **shape)
    values = proj.astype(np.float64), table.float32()[:, :width]
    return lambda: {"y": (y.value, per_layer_reference.per_layer_forward(*values, weight, scale, EPS))}


def gate_inputs(lab, g, u, layout) -> tuple[Tensor, dict]:
    """gu with g and u in a layout of shaders/gate.wgsl.j2, and the options that say so to its op.

    Packed: u begins right after g, whatever its width.
    """
    if layout == "stacked":
        return lab.input(np.concatenate([pad(g), pad(u)], axis=1)), {}
    if layout == "packed":
        return lab.padded(np.concatenate([g, u], axis=1)), {"up_off": g.shape[1]}
    return lab.padded(g), {"up": lab.padded(u)}


def gate(lab, act, rows, width, layout="stacked", scale=1.0, gain=4.0):
    """`gain`: the magnitude of the gate's input."""
    g, u, dm = gain * normal(rows, width), normal(rows, width, seed=1), normal(rows, width, seed=2)
    g.flat[:2] = [0, -0.0][: g.size]
    gu, options = gate_inputs(lab, g, u, layout)
    shape = {"rows": rows, "width": width, "act": act, "scale": scale, **options}
    m, dgu, state = lab.rows(rows, width), lab.output(rows, gu.shape[1]), lab.state()
    gate_forward(lab.plan, m.tensor, gu, state.tensor, record_id=0, **shape)
    gate_backward(lab.plan, dgu.tensor, lab.padded(dm), gu, **shape)

    def results():
        dg, du = gate_reference.gate_backward(dm, g.astype(np.float64), u, act, scale)
        found = {
            "m": (m.value, gate_reference.gate_forward(g.astype(np.float64), u, act, scale)),
            "state": (state.value, np.zeros(16)),
        }
        if layout == "separate":
            return found | {"dg": (dgu.value, dg)}
        up_off = options.get("up_off", padded(width))
        return found | {"dg": (dgu.value[:, :up_off], dg), "du": (dgu.value[:, up_off:], du)}

    return results


def gather(lab, rows, width, chunk):
    """Every second row, in descending order and in chunks. The last of the list have no target, and any index."""
    index = np.arange(rows - 1, -1, -2, dtype=np.int32)
    targets = index.copy()
    targets[-1:], targets[3:-1] = -1, -100
    used = np.flatnonzero(targets >= 0)
    index[targets < 0] += rows + 90
    chunks = -(-len(index) // chunk)  # the last one may extend past the list
    x, dy = normal(rows, width), normal(chunks * chunk, width, seed=1)
    gx, lists = lab.padded(x), (lab.input(index), lab.input(targets))
    ys, dx = [lab.rows(chunk, width) for _ in range(chunks)], lab.rows(rows, width)
    for i, y in enumerate(ys):
        shape = {"start": i * chunk, "rows": chunk, "width": width}
        gather_forward(lab.plan, y.tensor, gx, *lists, **shape)
        gather_backward(lab.plan, dx.exact, lab.padded(dy[i * chunk : (i + 1) * chunk]), *lists, **shape)

    def results():
        at = index[used]
        want, want_dx = np.zeros(dy.shape), np.full(dx.shape, POISON)  # rows that were not gathered stay unchanged
        want[used] = gather_reference.gather_forward(x, at)
        want_dx[at] = pad(gather_reference.gather_backward(dy[used], at, rows))[at]
        return {"y": (np.concatenate([y.value for y in ys]), want), "dx": (dx.value, want_dx)}

    return results


def adapter_dropout(lab, rows, width):
    p, key, x, start = 0.3, dropout.dropout_step_key(7, 3, 1), normal(rows, width), normal(rows, width, seed=1)
    step = step_buffer(lab.device)
    lab.device.write(step, pack_step(key=key))
    y, total, first = lab.rows(rows, width), lab.rows(rows, width, pad(start)), 64
    at = {"layer": 2, "module": "v_proj", "rows": rows, "width": width, "p": p, "first_row": first}
    dropout_forward(lab.plan, y.tensor, lab.padded(x), step, **at)
    dropout_add(lab.plan, total.tensor, lab.padded(x), step, **at)
    want = x * dropout.dropout_mask(key, 2, dropout.MODULES.index("v_proj"), first + rows, width, p)[first:] / (1 - p)
    return lambda: {"y": (y.value, want), "added": (total.value, start + want)}


def softcap(lab, rows, vocab, cap, scale=40.0):
    """Logits of magnitude `scale`."""
    z = scale * normal(rows, vocab)
    out = lab.rows(rows, vocab, pad(z))
    softcap_forward(lab.plan, out.tensor, rows=rows, vocab=vocab, cap=cap)
    return lambda: {"z": (out.value, cap_reference.softcap_forward(z.astype(np.float64), cap))}


def cross_entropy(lab, variant, rows, vocab, chunk, softcap=0.0, scale=5.0, offset=0.0):
    """`variant`: "plain", or "weighted" by row. Logits of magnitude `scale` around `offset`, in chunks.

    The last row has no target; with five rows or more, neither has the one before it.
    """
    ids = np.arange(rows, dtype=np.int32)[::-1] * 7 % vocab
    ids[0] = vocab - 1
    ids[-1:] = -1
    if rows >= 5:
        ids[-2] = -100
    chunks = -(-rows // chunk)
    logits = (scale * normal(chunks * chunk, vocab) + offset).astype(np.float32)
    padded_logits = pad(logits)
    padded_logits[:, vocab:] = offset + 10 * scale  # the padding must not count
    state, gids = lab.output(16, initial=FRESH, dtype="u32"), lab.input(ids)
    losses, plain, total = lab.output(rows), lab.output(rows), lab.output(2, initial=np.zeros(2), dtype="u32")
    grads, kept = ([lab.output(*x.shape, initial=x) for x in np.split(padded_logits, chunks)] for _ in range(2))
    weights = normal(rows) if variant == "weighted" else np.ones(rows)
    row_weights = lab.input(weights.astype(np.float32)) if variant == "weighted" else None
    for i in range(chunks):
        shape = {"start": i * chunk, "rows": chunk, "vocab": vocab, "record_id": i, "row_weights": row_weights}
        shape["softcap"] = softcap
        cross_entropy_forward(lab.plan, plain.exact, kept[i].tensor, gids, state.tensor, **shape)
        cross_entropy_forward_backward(lab.plan, losses.exact, grads[i].tensor, gids, state.tensor, **shape)
    loss_sum(lab.plan, total.exact, losses.exact, start=0, rows=rows)

    def results():
        used = np.flatnonzero(ids >= 0)
        x, w = logits[used].astype(np.float64), weights[used]
        y = cap_reference.softcap_forward(x, softcap) if softcap else x
        loss, lse = loss_reference.cross_entropy_forward(y, ids[used], w)
        want_loss, want = np.zeros(rows), np.zeros(logits.shape)
        want_loss[used] = loss
        want[used] = loss_reference.cross_entropy_backward(y, ids[used], lse, w)
        if softcap:
            want[used] = cap_reference.softcap_backward(want[used], y, softcap)
        return {
            "losses": (losses.value, want_loss),
            "losses of the forward": differing(plain.value, losses.value),
            "dlogits": (np.concatenate([g.value for g in grads]), want),
            "logits": differing(np.concatenate([k.value for k in kept]), padded_logits),
            "sum": (np.array([loss_value(total.value)]), loss.sum(keepdims=True)),
            "state": differing(state.value, np.array(FRESH, np.uint32)),
        }

    return results
