"""Attention of query rows against a KV cache, forward and backward: flash (the default), or chain (its slow check).

    score[t,j] = scale * q[t] . k[j]     for kv_start[t] <= j <= slot[t]        out = softmax(score) v, per head

Equations: reference/attention.py. Kernels: shaders/attention_flash_*.wgsl.j2 and attention_chain.wgsl.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import padded
from lorawgpu.ops import attention_chain, attention_flash

IMPLEMENTATIONS = {"flash": attention_flash, "chain": attention_chain}
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes for both implementations: query rows, cache slots, heads, and the row strides of q and of the cache."""

    rows: int
    slots: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def row_ld(self) -> int:
        return padded(self.heads * self.head_dim)

    @property
    def slot_ld(self) -> int:
        return padded(self.kv_heads * self.head_dim)

    def flops(self, products: int) -> float:
        """Operations of `products` causal products for one sequence that fills all rows; an upper bound for several."""
        return products * self.rows * min(self.rows + 1, 2 * self.slots) * self.head_dim * self.heads


def _checked(impl, heads, kv_heads, head_dim, q, kcache, per_row, per_slot, tensors) -> Sizes:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention impl is {impl!r}, want one of {sorted(IMPLEMENTATIONS)}")
    if kv_heads < 1 or heads % kv_heads or head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention: heads {heads} must be a multiple of kv_heads {kv_heads}, "
            f"head_dim {head_dim} even and at most {MAX_HEAD_DIM}"
        )
    sizes = Sizes(q.shape[0], kcache.shape[0], heads, kv_heads, head_dim)
    wanted = [(t, (sizes.rows,)) for t in per_row] + [(t, (sizes.slots,)) for t in per_slot]
    shapes = {"row": (sizes.rows, sizes.row_ld), "slot": (sizes.slots, sizes.slot_ld), "lse": (sizes.rows, 2 * heads)}
    wanted += [(t, shapes[kind]) for kind, some in tensors.items() for t in some]
    for tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"attention: {tensor.label} has shape {tuple(tensor.shape)}, want {shape}")
    return sizes


def log_sum_exp(lse):
    """Log-sum-exp, natural log, [M, NH], from the pairs [M, 2 NH] that `attention_forward` writes, on the host."""
    return (lse[:, 0::2].astype(np.float64) - np.log2(lse[:, 1::2].astype(np.float64))) * np.log(2)


def attention_forward(
    plan, out, lse, q, kcache, vcache, slot, kv_start, *, heads, kv_heads, head_dim, scale, workspace, impl="flash"
):
    """Record out, lse = attention(q, kcache, vcache).

    q, out f32 [M, padded(NH*HD)]; kcache, vcache f32 [S, padded(NKV*HD)]; slot, kv_start i32 [M], with
    0 <= kv_start <= slot < S (kernels read them as u32); lse f32 [M, 2 NH]: for each head the largest score / ln 2, and
    1 / sum exp(score - largest). `workspace` lends scratch: take(shape, dtype, label) -> Tensor, give(tensor).
    Cache slots between the first and the last that a sequence's rows see must be finite (see the shader's header). The
    bits of a row depend only on its own sequence.
    ValueError for a wrong shape; DeviceError if the scores of `chain` do not fit into a binding.
    """
    sizes = _checked(
        impl,
        heads,
        kv_heads,
        head_dim,
        q,
        kcache,
        [slot, kv_start],
        [],
        {"row": [q, out], "slot": [kcache, vcache], "lse": [lse]},
    )
    tensors = {"out": out, "lse": lse, "q": q, "kcache": kcache, "vcache": vcache, "slot": slot, "kv_start": kv_start}
    IMPLEMENTATIONS[impl].forward(plan, sizes, scale, workspace, **tensors)


def attention_backward(
    plan,
    dq,
    dk,
    dv,
    dout,
    out,
    lse,
    q,
    kcache,
    vcache,
    slot,
    kv_start,
    segment_end,
    *,
    heads,
    kv_heads,
    head_dim,
    scale,
    workspace,
    impl="flash",
):
    """Record dq (=), dk and dv (=, for every cache row) from dout and what the forward saved.

    Arguments as in attention_forward, but slot[t] must be t: key s is attended by rows s .. segment_end[s]-1 only.
    dq, dout [M, padded(NH*HD)]; dk, dv [S, padded(NKV*HD)]; segment_end i32 [S]. Sums have a fixed order, no atomics.
    """
    sizes = _checked(
        impl,
        heads,
        kv_heads,
        head_dim,
        q,
        kcache,
        [slot, kv_start],
        [segment_end],
        {"row": [q, out, dq, dout], "slot": [kcache, vcache, dk, dv], "lse": [lse]},
    )
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dout": dout}
    saved = {"out": out, "lse": lse, "q": q, "kcache": kcache, "vcache": vcache}
    visibility = {"slot": slot, "kv_start": kv_start, "segment_end": segment_end}
    IMPLEMENTATIONS[impl].backward(plan, sizes, scale, workspace, **gradients, **saved, **visibility)
