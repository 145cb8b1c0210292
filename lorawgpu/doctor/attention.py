"""Checks of attention kernels against the float64 reference: (lab, variant, sizes) -> results; see check.py."""

from dataclasses import dataclass

import numpy as np

from lorawgpu.doctor.check import differing
from lorawgpu.doctor.lab import NanScratch, normal, pad
from lorawgpu.gpu import padded
from lorawgpu.ops.attention import attention_backward, attention_forward, log_sum_exp
from lorawgpu.ops.attention_decode import attention_decode, attention_decode_prepared, parts_shape, stats_shape
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.rope import rope_table
from lorawgpu.reference import attention as reference
from lorawgpu.reference import rope

THETA = 10000.0
VARIANTS = {  # options by a name that doctor prints
    "window": {"window": 7, "accumulate": True},
    "soft cap": {"softcap": 0.7},
    "pairs": {"room": 1 << 24},
    "pairs, window": {"room": 1 << 24, "window": 7, "accumulate": True},
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
    room: int = 0  # elements of scratch for the backward
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
        attention_backward(lab.plan, *tensors, accumulate_kv=bool(x.added_to), room=x.room, **options)
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


@dataclass
class NewTokens:
    """One new token per sequence, and a cache with spans for all of them. Neither slots nor positions start at 0."""

    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple  # with the new token

    def __post_init__(self):
        rows, span = len(self.lengths), padded(max(self.lengths) + SKIPPED, 64)
        self.q_width, self.kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.k_off, self.slots = padded(self.q_width), rows * span
        self.v_off = self.k_off + padded(self.kv_width)
        self.position, self.kv_start = np.array(self.lengths) + 2, np.arange(rows) * span + SKIPPED
        self.slot = self.kv_start + np.array(self.lengths) - 1
        self.qkv = 3 * normal(rows, self.v_off + padded(self.kv_width))
        self.cache = normal(2, self.slots, self.kv_width)
        self.frequencies = rope.rope_inv_freq(THETA, self.head_dim)
        self.q, self.k = (self._rotated(*at) for at in ((0, self.q_width), (self.k_off, self.kv_width)))
        self.v = self.qkv[:, self.v_off : self.v_off + self.kv_width]

    def _rotated(self, begin, width):
        part = self.qkv[:, begin : begin + width].astype(np.float64)
        return rope.rope_forward(part, *rope.rope_tables(self.position, self.frequencies))

    @property
    def rows(self):
        """The contents of ops.decode_state's buffer."""
        state = np.zeros((len(FIELDS), STRIDE), np.int32)
        for name in ("position", "slot", "kv_start"):
            state[FIELDS.index(name), : len(self.lengths)] = getattr(self, name)
        return state

    @property
    def cache_after(self):
        """k and v of all slots, the new ones included, float64."""
        after = self.cache.astype(np.float64)
        after[:, self.slot] = self.k, self.v
        return after


def decode(lab, heads, kv_heads, head_dim, *lengths, is_fused=True, window=None, softcap=None):
    """One new token per sequence, counted in `lengths`; if not is_fused, its q, k and v are prepared."""
    x = NewTokens(heads, kv_heads, head_dim, lengths)
    parts = lab.output(*parts_shape(len(lengths), padded(x.q_width)))
    stats = lab.output(*stats_shape(len(lengths), heads))
    before = x.cache if is_fused else x.cache_after.astype(np.float32)
    k, v = (lab.rows(x.slots, x.kv_width, initial=pad(c)) for c in before)
    options = {"count": len(lengths), "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    options |= {"scale": head_dim**-0.5, "window": window, "softcap": softcap}
    tensors, rows = [t.tensor for t in (parts, stats, k, v)], lab.input(x.rows)
    longest = max(x.position) + 1
    if is_fused:
        tensors += [lab.input(x.qkv), lab.input(rope_table(x.frequencies, longest))]
        attention_decode(lab.plan, *tensors, rows, k_off=x.k_off, v_off=x.v_off, **options)
    else:
        tensors.append(lab.padded(x.q.astype(np.float32)))
        attention_decode_prepared(lab.plan, *tensors, rows, longest=longest, **options)

    def results():
        shape = x.slot, x.kv_start, heads, kv_heads, head_dim**-0.5, window, softcap
        want, _ = reference.attention_forward(x.q, *x.cache_after, *shape)
        rows_of = zip(parts.value.astype(np.float64), stats.value.astype(np.float64), strict=True)
        others = np.setdiff1d(np.arange(x.slots), x.slot)
        return {
            "out": (np.stack([_combined(p, s, heads, head_dim) for p, s in rows_of]), want),
            "k": (k.value[x.slot], x.k),
            "v": differing(v.value[x.slot, : x.kv_width], x.v),
            "other slots": differing(np.stack([k.value, v.value])[:, others, : x.kv_width], x.cache[:, others]),
        }

    return results


def decode_variant(lab, variant, *sizes):
    """The same with the options of one of VARIANTS; those with a window take prepared q, k and v."""
    options = {name: VARIANTS[variant].get(name) for name in ("window", "softcap")}
    return decode(lab, *sizes, is_fused=not options["window"], **options)
