"""Gather target rows from the residual stream, and scatter their gradient back. Equations: shaders/gather.wgsl."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold_elements


def gather_forward(plan, y, x, index, target_ids, *, start, rows, width):
    """y[i] = x[index[start+i]], y [rows, width]; 0 if target_ids[start+i] is negative or start+i is past the end.

    x [any, width]; index and target_ids i32 of the same length, one entry per target row; this chunk reads `rows`.
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
    """dx[index[start+i]] = dy[i] for the same rows. Other rows are not written: clear dx before the first chunk."""
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
