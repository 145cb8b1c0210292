"""Attention as separate products over a stored score matrix: simple and exact, to check flash against.

Equations and kernels: shaders/attention_chain.wgsl. `sizes` is an ops.attention.Sizes; shapes are checked there.
"""

from lorawgpu.errors import DeviceError
from lorawgpu.gpu import padded

TILE = 16


def weights_shape(rows: int, slots: int, heads: int) -> tuple:
    """Shape [heads, rows, span] of the stored scores. The forward needs one such f32 buffer, the backward two."""
    return heads, rows, padded(slots)


def _take(plan, workspace, sizes, label):
    """Take a buffer for scores. DeviceError if a binding cannot hold it."""
    shape = weights_shape(sizes.rows, sizes.slots, sizes.heads)
    if (nbytes := 4 * shape[0] * shape[1] * shape[2]) > plan.device.max_binding:
        raise DeviceError(
            f"{label} {shape}: {nbytes:,} bytes in one binding; {plan.device.name} allows "
            f"{plan.device.max_binding:,}: use attn_implementation flash, which stores no scores"
        )
    return workspace.take(shape, "f32", label)


def _record(plan, entry, grid, sizes, scale=1.0, flops=0.0, **tensors):
    params = {
        "rows": sizes.rows,
        "slots": sizes.slots,
        "span": padded(sizes.slots),
        "heads": sizes.heads,
        "group": sizes.group,
        "head_dim": sizes.head_dim,
        "row_ld": sizes.row_ld,
        "slot_ld": sizes.slot_ld,
        "scale": scale,
    }
    plan.record("attention_chain", entry, grid, params=params, flops=flops, **tensors)


def _tiles(n):
    return -(-n // TILE)


def _scores(plan, weights, x, cache, slot, kv_start, sizes, scale):
    grid = _tiles(sizes.slots), _tiles(sizes.rows), sizes.heads
    _record(
        plan,
        "scores",
        grid,
        sizes,
        scale,
        sizes.flops(1),
        weights=weights,
        x=x,
        cache=cache,
        slot=slot,
        kv_start=kv_start,
    )


def _softmax(plan, weights, lse, slot, kv_start, sizes):
    _record(plan, "softmax", (sizes.rows, sizes.heads), sizes, weights=weights, lse=lse, slot=slot, kv_start=kv_start)


def _apply(plan, row_out, attn, cache, slot, kv_start, sizes, scale=1.0):
    grid = _tiles(sizes.head_dim), _tiles(sizes.rows), sizes.heads
    _record(
        plan,
        "apply",
        grid,
        sizes,
        scale,
        sizes.flops(1),
        row_out=row_out,
        attn=attn,
        cache=cache,
        slot=slot,
        kv_start=kv_start,
    )


def _apply_transposed(plan, slot_out, attn, x, segment_end, sizes, scale=1.0):
    grid = _tiles(sizes.head_dim), _tiles(sizes.slots), sizes.kv_heads
    _record(
        plan,
        "apply_transposed",
        grid,
        sizes,
        scale,
        sizes.flops(1),
        slot_out=slot_out,
        attn=attn,
        x=x,
        segment_end=segment_end,
    )


def forward(plan, sizes, scale, workspace, *, out, lse, q, kcache, vcache, slot, kv_start):
    attn = _take(plan, workspace, sizes, "attention weights")
    _scores(plan, attn, q, kcache, slot, kv_start, sizes, scale)
    _softmax(plan, attn, lse, slot, kv_start, sizes)
    _apply(plan, out, attn, vcache, slot, kv_start, sizes)
    workspace.give(attn)


def backward(
    plan, sizes, scale, workspace, *, dq, dk, dv, dout, out, lse, q, kcache, vcache, slot, kv_start, segment_end
):
    """Recomputes the attention weights. It uses neither `out` nor `lse`, so it checks flash, which does."""
    attn = _take(plan, workspace, sizes, "attention weights")
    dscores = _take(plan, workspace, sizes, "gradient of the attention weights")
    lse_again = workspace.take(lse.shape, "f32", "attention lse, again")
    _scores(plan, attn, q, kcache, slot, kv_start, sizes, scale)
    _softmax(plan, attn, lse_again, slot, kv_start, sizes)
    _scores(plan, dscores, dout, vcache, slot, kv_start, sizes, 1.0)  # dattn = dout . v
    _apply_transposed(plan, dv, attn, dout, segment_end, sizes)
    _record(
        plan,
        "softmax_backward",
        (sizes.rows, sizes.heads),
        sizes,
        weights=dscores,
        attn=attn,
        slot=slot,
        kv_start=kv_start,
    )
    _apply(plan, dq, dscores, kcache, slot, kv_start, sizes, scale)
    _apply_transposed(plan, dk, dscores, q, segment_end, sizes, scale)
    for scratch in (attn, dscores, lse_again):
        workspace.give(scratch)
