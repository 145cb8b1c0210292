"""Gradient of a fused projection with its adapters; mirrors model/linear.py."""

from ..ops.linear import linear_backward, lora_back, lora_backward, lora_dropout_back


def project_backward(c, dx, dy, source, weight, group, h, *, width):
    """Adapter gradients +=, dx [rows, in] = dy W + adapters; dx None: nothing below needs it.

    `source` is a function that records the projection's unquantised input again and returns (tensor, scratch to give
    back); it is called only where an adapter needs it. The quantiser is straight-through.
    """
    dh, lora = None, None
    if group:
        dh = c.take(group.rank, f"dh {group.group}")
        x, scratch = source()
        lora_backward(
            c.plan,
            c.work,
            dh,
            dy,
            h,
            x,
            group,
            c.adapter.params,
            c.adapter.grads,
            rows=c.rows,
            width=width,
            step=c.step,
            p=c.dropout,
        )
        c.work.give(*scratch)
        lora = lora_back(group, dh, c.adapter.params) if c.dropout == 0.0 else None
    if dx is not None:
        linear_backward(c.plan, dx, dy, weight, rows=c.rows, lora=lora)
        if group and lora is None:
            lora_dropout_back(
                c.plan, c.work, dx, dh, group, c.adapter.params, rows=c.rows, width=width, step=c.step, p=c.dropout
            )
    if dh:
        c.work.give(dh)
