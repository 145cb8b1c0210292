"""Gradient of the head; mirrors model/head.py."""

from lorawgpu.ops.gather import gather_backward
from lorawgpu.ops.linear import linear_backward
from lorawgpu.ops.rmsnorm import rmsnorm_backward


def head_backward(c, head, dx, start, rows):
    """Write dx of target rows [start, start + rows), given the dlogits in head.logits. Needs `head_forward` first."""
    shape = {"rows": rows, "width": c.config.hidden_size}
    dlogits = head.logits.rows(0, rows)
    linear_backward(c.plan, c.work, head.n, dlogits, c.model.head, rows=rows, room=c.room)
    dgathered = c.work.take(head.x.shape, label="dhead x")
    rmsnorm_backward(c.plan, dgathered, head.n, head.x, c.model.norm, head.rstd, accumulate=False, **shape)
    gather_backward(c.plan, dx, dgathered, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    c.work.give(dgathered)
