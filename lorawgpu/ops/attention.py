"""Attention of query rows against a KV cache, forward and backward: flash (the default), or chain (its slow check).

    score[t,j] = scale * q[t] . k[j]     for kv_start[t] <= j <= slot[t]        out = softmax(score) v, per head

With a window, j > slot[t] - window too; with a soft cap, score = softcap * tanh(score / softcap).

Equations: reference/attention.py. Kernels: shaders/attention_flash_*.wgsl.j2 and attention_chain.wgsl.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu import padded
from lorawgpu.ops import attention_chain, attention_flash

IMPLEMENTATIONS = {"flash": attention_flash, "chain": attention_chain}
MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes and options for both implementations: query rows, cache slots, heads, and what scores are."""

    rows: int
    slots: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    longest: int = 1 << 31  # most tokens of a sequence

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def row_ld(self) -> int:
        """Row stride of q."""
        return padded(self.heads * self.head_dim)

    @property
    def slot_ld(self) -> int:
        """Row stride of the caches."""
        return padded(self.kv_heads * self.head_dim)

    @property
    def reach(self) -> int:
        """Keys that a row sees at most: the window, if it is shorter than the cache."""
        return min(self.window or self.slots, self.slots)

    def flops(self, products: int) -> float:
        """Operations of `products` causal products for one sequence that fills all rows; an upper bound for several."""
        keys = min(self.rows + 1, 2 * self.reach)  # twice those that a row sees
        return products * self.rows * keys * self.head_dim * self.heads


def check_options(heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None) -> None:
    """ValueError for heads or options that the kernels do not support."""
    if kv_heads < 1 or heads % kv_heads or head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention: heads {heads} must be a multiple of kv_heads {kv_heads}, "
            f"head_dim {head_dim} even and at most {MAX_HEAD_DIM}"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window is {window}, want at least 1 key, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap is {softcap}, want a number above 0, or None")


def _check(impl, problem, per_row, per_slot, tensors) -> None:
    """ValueError for an unknown implementation, unsupported options, or a tensor of another shape."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"attention impl is {impl!r}, want one of {sorted(IMPLEMENTATIONS)}")
    check_options(problem.heads, problem.kv_heads, problem.head_dim, problem.window, problem.softcap)
    rows, slots = problem.rows, problem.slots
    wanted = [(t, (rows,)) for t in per_row] + [(t, (slots,)) for t in per_slot]
    shapes = {"row": (rows, problem.row_ld), "slot": (slots, problem.slot_ld), "lse": (rows, 2 * problem.heads)}
    wanted += [(t, shapes[kind]) for kind, some in tensors.items() for t in some]
    for tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"attention: {tensor.label} has shape {tuple(tensor.shape)}, want {shape}")


def log_sum_exp(lse):
    """Log-sum-exp, natural log, [M, NH], from the pairs [M, 2 NH] that `attention_forward` writes, on the host."""
    return (lse[:, 0::2].astype(np.float64) - np.log2(lse[:, 1::2].astype(np.float64))) * np.log(2)


def attention_forward(
    plan,
    out,
    lse,
    q,
    kcache,
    vcache,
    slot,
    kv_start,
    *,
    heads,
    kv_heads,
    head_dim,
    scale,
    workspace,
    window=None,
    softcap=None,
    impl="flash",
):
    """Record out, lse = attention(q, kcache, vcache).

    q, out f32 [M, padded(NH*HD)]; kcache, vcache f32 [S, padded(NKV*HD)]; slot, kv_start i32 [M], with
    0 <= kv_start <= slot < S (kernels read them as u32); lse f32 [M, 2 NH]: for each head the largest score / ln 2, and
    1 / sum exp(score - largest). `workspace` lends scratch: take(shape, dtype, label) -> Tensor, give(tensor).
    `window`: the keys that a row sees at most, its own included. `softcap`: the bound of the scores.
    Cache slots between the first and the last that a sequence's rows see must be finite (see the shader's header). The
    bits of a row depend only on its own sequence.
    ValueError for a wrong shape or option; DeviceError if the scores of `chain` do not fit into a binding.
    """
    problem = AttentionProblem(q.shape[0], kcache.shape[0], heads, kv_heads, head_dim, scale, window, softcap)
    _check(impl, problem, [slot, kv_start], [], {"row": [q, out], "slot": [kcache, vcache], "lse": [lse]})
    tensors = {"out": out, "lse": lse, "q": q, "kcache": kcache, "vcache": vcache, "slot": slot, "kv_start": kv_start}
    IMPLEMENTATIONS[impl].forward(plan, problem, workspace, **tensors)


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
    window=None,
    softcap=None,
    accumulate_kv=False,
    impl="flash",
    longest=None,
    room=0,
):
    """Record dq (=), dk and dv (= or, if accumulate_kv, +=, for every cache row) from dout and what the forward saved.

    Arguments as in attention_forward, but slot[t] must be t: key s is attended by rows s .. segment_end[s]-1 only.
    dq, dout [M, padded(NH*HD)]; dk, dv [S, padded(NKV*HD)]; segment_end i32 [S]. Sums have a fixed order, no atomics.
    longest: tokens of the longest sequence; room: elements of scratch that cost no memory (Context.room).
    """
    sizes = q.shape[0], kcache.shape[0], heads, kv_heads, head_dim, scale, window, softcap
    problem = AttentionProblem(*sizes, longest or q.shape[0])
    tensors = {"row": [q, out, dq, dout], "slot": [kcache, vcache, dk, dv], "lse": [lse]}
    _check(impl, problem, [slot, kv_start], [segment_end], tensors)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dout": dout}
    saved = {"out": out, "lse": lse, "q": q, "kcache": kcache, "vcache": vcache}
    visibility = {"slot": slot, "kv_start": kv_start, "segment_end": segment_end}
    IMPLEMENTATIONS[impl].backward(plan, problem, workspace, accumulate_kv, room, **gradients, **saved, **visibility)
