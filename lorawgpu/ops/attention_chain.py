"""Attention as separate products over a stored score matrix: simple and exact, to check flash against.

Equations and kernels: shaders/attention_chain.wgsl. `problem` is an ops.attention.AttentionProblem, checked there.
"""

from lorawgpu.errors import DeviceError
from lorawgpu.gpu import padded

TILE = 16


def weights_shape(rows: int, slots: int, heads: int) -> tuple:
    """Shape [heads, rows, span] of the stored scores. The forward needs one such f32 buffer, the backward two."""
    return heads, rows, padded(slots)


def _take(plan, workspace, problem, label):
    """Take a buffer for scores. DeviceError if a binding cannot hold it."""
    shape = weights_shape(problem.rows, problem.slots, problem.heads)
    if (nbytes := 4 * shape[0] * shape[1] * shape[2]) > plan.device.max_binding:
        raise DeviceError(
            f"{label} {shape}: {nbytes:,} bytes in one binding; {plan.device.name} allows "
            f"{plan.device.max_binding:,}: use attn_implementation flash, which stores no scores"
        )
    return workspace.take(shape, "f32", label)


def _record(plan, entry, grid, problem, scale=1.0, flops=0.0, accumulate=False, **tensors):
    params = {
        "rows": problem.rows,
        "slots": problem.slots,
        "span": padded(problem.slots),
        "heads": problem.heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "row_ld": problem.row_ld,
        "slot_ld": problem.slot_ld,
        "scale": scale,
        "window": problem.reach,
        "softcap": problem.softcap or 0.0,
        "accumulate": accumulate,
    }
    plan.record("attention_chain", entry, grid, params=params, flops=flops, **tensors)


def _tiles(n):
    return -(-n // TILE)


def _scores(plan, entry, weights, x, cache, rows_see, problem, scale):
    grid = _tiles(problem.slots), _tiles(problem.rows), problem.heads
    tensors = {"weights": weights, "x": x, "cache": cache, **rows_see}
    _record(plan, entry, grid, problem, scale, problem.flops(1), **tensors)


def _attn(plan, attn, lse, q, kcache, rows_see, problem):
    """The attention weights, and their statistics."""
    entry = "capped_scores" if problem.softcap else "scores"
    _scores(plan, entry, attn, q, kcache, rows_see, problem, problem.scale)
    _record(plan, "softmax", (problem.rows, problem.heads), problem, weights=attn, lse=lse, **rows_see)


def _apply(plan, row_out, attn, cache, rows_see, problem, scale=1.0):
    grid = _tiles(problem.head_dim), _tiles(problem.rows), problem.heads
    tensors = {"row_out": row_out, "attn": attn, "cache": cache, **rows_see}
    _record(plan, "apply", grid, problem, scale, problem.flops(1), **tensors)


def _apply_transposed(plan, slot_out, attn, x, segment_end, problem, scale, accumulate):
    grid = _tiles(problem.head_dim), _tiles(problem.slots), problem.kv_heads
    tensors = {"slot_out": slot_out, "attn": attn, "x": x, "segment_end": segment_end}
    _record(plan, "apply_transposed", grid, problem, scale, problem.flops(1), accumulate, **tensors)


def forward(plan, problem, workspace, *, out, lse, q, kcache, vcache, slot, kv_start):
    attn, rows_see = _take(plan, workspace, problem, "attention weights"), {"slot": slot, "kv_start": kv_start}
    _attn(plan, attn, lse, q, kcache, rows_see, problem)
    _apply(plan, out, attn, vcache, rows_see, problem)
    workspace.give(attn)


def backward(
    plan,
    problem,
    workspace,
    accumulate_kv,
    room,
    *,
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
):
    """Recomputes the attention weights. It uses neither `out` nor `lse`, so it checks flash, which does."""
    attn, rows_see = _take(plan, workspace, problem, "attention weights"), {"slot": slot, "kv_start": kv_start}
    dscores = _take(plan, workspace, problem, "gradient of the attention weights")
    lse_again = workspace.take(lse.shape, "f32", "attention lse, again")
    _attn(plan, attn, lse_again, q, kcache, rows_see, problem)
    _scores(plan, "scores", dscores, dout, vcache, rows_see, problem, 1.0)  # dattn = dout . v
    _apply_transposed(plan, dv, attn, dout, segment_end, problem, 1.0, accumulate_kv)
    grid = problem.rows, problem.heads
    _record(plan, "softmax_backward", grid, problem, weights=dscores, attn=attn, **rows_see)
    if problem.softcap:
        _scores(plan, "softcap_slope", dscores, q, kcache, rows_see, problem, problem.scale)
    _apply(plan, dq, dscores, kcache, rows_see, problem, problem.scale)
    _apply_transposed(plan, dk, dscores, q, segment_end, problem, problem.scale, accumulate_kv)
    for scratch in (attn, dscores, lse_again):
        workspace.give(scratch)
