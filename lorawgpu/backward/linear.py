"""Gradient of a fused projection with its adapters; mirrors model/linear.py."""

from lorawgpu.ops.linear import linear_backward
from lorawgpu.ops.lora import lora_back, lora_backward, lora_dropout_back


def project_backward(c, layer, name, dx, dy, x, scratch, s, *, width, accumulate=False):
    """Adapter gradients +=; dx [rows, in] (+)= dy W + the adapters' term, unless dx is None.

    x: the projection's unquantized input, read by adapters only; `scratch` is given back after that. Gradients pass
    straight through the quantizer.
    """
    weight, group, dh, lora = layer.weights[name], c.group(layer, name), None, None
    if group:
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
                first_row=c.first_row,
            )
        lora = lora_back(group, dh, c.adapter.params) if c.dropout == 0.0 else None
    c.work.give(*scratch)
    if dx is not None:
        with c.plan.scope(f"d{name}"):
            linear_backward(c.plan, c.work, dx, dy, weight, rows=c.rows, lora=lora, accumulate=accumulate, room=c.room)
            if group and lora is None:
                options = {"rows": c.rows, "width": width, "step": c.step, "p": c.dropout, "first_row": c.first_row}
                lora_dropout_back(c.plan, c.work, dx, dh, group, c.adapter.params, **options)
    if dh:
        c.work.give(dh)
