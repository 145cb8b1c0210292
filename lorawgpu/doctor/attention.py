"""Checks of attention kernels against the float64 reference: (lab, variant, sizes) -> results; see check.py."""

from dataclasses import dataclass

import numpy as np

from lorawgpu.doctor.check import differing
from lorawgpu.doctor.lab import NanScratch, normal, pad
from lorawgpu.gpu import padded
from lorawgpu.ops.attention import attention_backward, attention_forward, log_sum_exp
from lorawgpu.ops.attention_decode import attention_decode, parts_shape, stats_shape
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.rope import rope_table
from lorawgpu.reference import attention as reference
from lorawgpu.reference import rope

THETA = 10000.0
VARIANTS = {  # options by a name that doctor prints
    "window": {"window": 7, "accumulate": True},
    "soft cap": {"softcap": 0.7},
    "all": {"window": 7, "softcap": 0.7, "accumulate": True},
}
SKIPPED = 32  # slots at the start of a sequence's span that it does not use


@dataclass
class AttentionInput:
    """Query rows and the KV cache: row t attends to slots kv_start[t] to slot[t]. Values are float32."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    slot: np.ndarray
    kv_start: np.ndarray
    segment_end: np.ndarray
    q: np.ndarray
    dout: np.ndarray
    k: np.ndarray
    v: np.ndarray
    window: int | None = None
    softcap: float | None = None
    added_to: tuple = ()  # dk and dv before the backward, which adds to them; empty if it overwrites them

    @property
    def shape(self):
        """The arguments of the reference after q, k and v."""
        return self.slot, self.kv_start, self.heads, self.kv_heads, self.scale, self.window, self.softcap

    @property
    def options(self):
        """The keywords of ops.attention."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return sizes | {"scale": self.scale, "window": self.window, "softcap": self.softcap}


def sequences(
    heads, kv_heads, head_dim, *lengths, tail=0, spare=0, gain=1.0, seed=0, scale=None, accumulate=False, **options
) -> AttentionInput:
    """Random sequences of these lengths, one after another, and `tail` rows that attend only to themselves.

    spare: slots that no row attends to. gain: the size of all values. accumulate: dk and dv are added to. options:
    window, softcap.
    """
    starts = np.cumsum([0, *lengths, *[1] * tail])
    rows, counts = starts[-1], np.diff(starts)
    slot, kv_start = np.arange(rows), np.repeat(starts[:-1], counts)
    segment_end = np.append(np.repeat(starts[1:], counts), np.zeros(spare, int))
    q, dout = (gain * normal(rows, heads * head_dim, seed=4 * seed + i) for i in (0, 1))
    k, v = (gain * normal(rows + spare, kv_heads * head_dim, seed=4 * seed + i) for i in (2, 3))
    scale = head_dim**-0.5 if scale is None else scale
    options["added_to"] = tuple(normal(2, *k.shape, seed=4 * seed)) if accumulate else ()
    return AttentionInput(heads, kv_heads, head_dim, scale, slot, kv_start, segment_end, q, dout, k, v, **options)


def record_attention(lab, impl, x: AttentionInput, backward=True) -> dict:
    """Record the ops; returns the outputs by name: out, lse, and with `backward` dq, dk, dv."""
    (rows, q_width), (slots, kv_width) = x.q.shape, x.k.shape
    made = {"out": lab.rows(rows, q_width), "lse": lab.output(rows, 2 * x.heads)}
    q, k, v, dout = (lab.padded(a) for a in (x.q, x.k, x.v, x.dout[:rows]))
    slot, kv_start, segment_end = (lab.input(a.astype(np.uint32)) for a in (x.slot, x.kv_start, x.segment_end))
    options = x.options | {"impl": impl, "workspace": NanScratch(lab.device)}
    out, lse = (made[name].exact for name in ("out", "lse"))
    attention_forward(lab.plan, out, lse, q, k, v, slot, kv_start, **options)
    if backward:
        before = [pad(a) for a in x.added_to] or [None, None]
        dk, dv = (lab.rows(slots, kv_width, initial=a) for a in before)
        made |= {"dq": lab.rows(rows, q_width), "dk": dk, "dv": dv}
        dq, dk, dv = (made[name].exact for name in ("dq", "dk", "dv"))
        tensors = dq, dk, dv, dout, out, lse, q, k, v, slot, kv_start, segment_end
        attention_backward(lab.plan, *tensors, accumulate_kv=bool(x.added_to), **options)
    return made


def expected_attention(x: AttentionInput, backward=True) -> dict:
    """The reference's outputs by the same names."""
    q, k, v, dout = (a.astype(np.float64) for a in (x.q, x.k, x.v, x.dout))
    out, lse = reference.attention_forward(q, k, v, *x.shape)
    found = {"out": out, "lse": lse.T}
    if backward:
        found |= zip(("dq", "dk", "dv"), reference.attention_backward(dout, q, k, v, out, lse, *x.shape), strict=True)
        found |= {name: found[name] + before for name, before in zip(("dk", "dv"), x.added_to, strict=False)}
    return found


def compared(made: dict, wanted: dict) -> dict:
    """The results of a check, after the run."""
    values = {name: output.value for name, output in made.items()}
    values["lse"] = log_sum_exp(values["lse"])
    return {name: (values[name], want) for name, want in wanted.items()}


def attention(lab, impl, *sizes, **options):
    """Forward and backward; sizes and options as for `sequences`."""
    x = sequences(*sizes, **options)
    made = record_attention(lab, impl, x)
    return lambda: compared(made, expected_attention(x))


def attention_variant(lab, impl, variant, *sizes):
    """The same with the options of one of VARIANTS."""
    return attention(lab, impl, *sizes, **VARIANTS[variant])


def _combined(parts, stats, heads, head_dim):
    """Combines the splits of one row, as matvec_input.wgsl does."""
    used = int(stats[0, 0, 2])
    weight = np.exp2(stats[:used, :, 0] - stats[:used, :, 0].max(0))
    values = parts[:used, : heads * head_dim].reshape(used, heads, head_dim)
    return ((weight[..., None] * values).sum(0) / (weight * stats[:used, :, 1]).sum(0)[:, None]).ravel()


def decode(lab, heads, kv_heads, head_dim, *lengths):
    """One new token per sequence, counted in `lengths`. Neither slots nor positions of a sequence start at 0."""
    rows, span = len(lengths), padded(max(lengths) + SKIPPED, 64)
    q_width, width = heads * head_dim, kv_heads * head_dim
    q_ld, kv_ld, scale = padded(q_width), padded(width), head_dim**-0.5
    position, first = np.array(lengths) + 2, np.arange(rows) * span + SKIPPED
    slot = first + np.array(lengths) - 1
    qkv = 3 * normal(rows, q_ld + 2 * kv_ld)
    cache = np.stack([pad(c) for c in normal(2, rows * span, width)])
    state = np.zeros((len(FIELDS), STRIDE), np.int32)
    for name, values in (("position", position), ("slot", slot), ("kv_start", first)):
        state[FIELDS.index(name), :rows] = values
    parts, stats = lab.output(*parts_shape(rows, q_ld)), lab.output(*stats_shape(rows, heads))
    k, v = (lab.output(rows * span, kv_ld, initial=c) for c in cache)
    frequencies = rope.rope_inv_freq(THETA, head_dim)
    inputs = lab.input(qkv), lab.input(rope_table(frequencies, max(position) + 1)), lab.input(state)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "k_off": q_ld, "v_off": q_ld + kv_ld}
    tensors = (t.tensor for t in (parts, stats, k, v))
    attention_decode(lab.plan, *tensors, *inputs, count=rows, scale=scale, **sizes)

    def results():
        tables, others = rope.rope_tables(position, frequencies), np.setdiff1d(np.arange(rows * span), slot)
        q, new_k = (
            rope.rope_forward(part.astype(np.float64), *tables)
            for part in (qkv[:, :q_width], qkv[:, q_ld : q_ld + width])
        )
        new_v = qkv[:, q_ld + kv_ld : q_ld + kv_ld + width]
        seen_k, seen_v = cache[:, :, :width].astype(np.float64)
        seen_k[slot], seen_v[slot] = new_k, new_v
        want, _ = reference.attention_forward(q, seen_k, seen_v, slot, first, heads, kv_heads, scale)
        rows_of = zip(parts.value.astype(np.float64), stats.value.astype(np.float64), strict=True)
        return {
            "out": (np.stack([_combined(p, s, heads, head_dim) for p, s in rows_of]), want),
            "k": (k.value[slot], new_k),
            "v": differing(v.value[slot, :width], new_v),
            "other slots": differing(np.stack([k.value, v.value])[:, others], cache[:, others]),
        }

    return results
