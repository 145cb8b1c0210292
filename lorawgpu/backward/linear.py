"""Gradient of a fused projection with its adapters; mirrors model/linear.py."""

from lorawgpu.ops.linear import linear_backward
from lorawgpu.ops.lora import lora_back, lora_backward, lora_dropout_back
from lorawgpu.ops.rmsnorm import rmsnorm_forward


def project_backward(c, layer, name, dx, dy, source, s, *, width):
    """Adapter gradients +=, dx [rows, in] = dy W + adapters; dx None: nothing below needs it.

    `source` is a function that records the projection's unquantised input again and returns (tensor, scratch to give
    back); it is called only where an adapter needs it. The quantiser is straight-through.
    """
    weight, group, dh, lora = getattr(layer, name), c.group(layer, name), None, None
    if group:
        x, scratch = source()
        with c.plan.scope(name):
            dh = c.take(group.rank, f"dh {name}")
            lora_backward(
                c.plan,
                c.work,
                dh,
                dy,
                s.h[name],
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
        with c.plan.scope(f"d{name}"):
            linear_backward(c.plan, c.work, dx, dy, weight, rows=c.rows, lora=lora)
            if group and lora is None:
                lora_dropout_back(
                    c.plan, c.work, dx, dh, group, c.adapter.params, rows=c.rows, width=width, step=c.step, p=c.dropout
                )
    if dh:
        c.work.give(dh)


def renorm(c, x, weight, rstd, width, label):
    """rmsnorm(x) again in scratch, as a `source` of `project_backward`: (tensor, scratch to give back)."""
    y = c.take(x.shape[1], label)
    rmsnorm_forward(c.plan, y, rstd, x, weight, rows=c.rows, width=width, eps=c.config.rms_norm_eps)
    return y, (y,)
