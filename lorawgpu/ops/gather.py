"""Rows with a target, out of the residual stream and back into its gradient. Equations: shaders/gather.wgsl."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold_elements


def gather_forward(plan, y, x, index, target_ids, *, start, rows, width):
    """y[i] [rows, width] = x[index[start+i]]; 0 where target_ids[start+i] is negative or start+i is past their end.

    x [any rows, width]; index, target_ids i32 of one length: all target rows, of which this chunk reads `rows`.
    """
    params = _params(y, x, index, target_ids, start, rows, width)
    plan.record(
        "gather",
        "forward",
        fold_elements(rows * padded(width)),
        params=params,
        nbytes=2 * y.nbytes,
        index=index,
        target_ids=target_ids,
        x=x,
        y=y,
    )


def gather_backward(plan, dx, dy, index, target_ids, *, start, rows, width):
    """dx[index[start+i]] = dy[i] for the same rows; no other row of dx is written, so clear it before the chunks."""
    params = _params(dy, dx, index, target_ids, start, rows, width)
    plan.record(
        "gather",
        "backward",
        fold_elements(rows * padded(width)),
        params=params,
        nbytes=2 * dy.nbytes,
        index=index,
        target_ids=target_ids,
        dy=dy,
        dx=dx,
    )


def _params(y, x, index, target_ids, start, rows, width) -> dict:
    ld = expect_rows(rows, width, y=y)
    expect("x", x, (1, ld))
    expect("index", index, (1,), "i32")
    expect("target_ids", target_ids, index.shape, "i32")
    return {"rows": rows, "ld4": ld // 4, "start": start, "count": index.shape[0], "source_rows": x.shape[0]}
