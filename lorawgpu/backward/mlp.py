"""Gradient of the feed-forward half block; mirrors model/mlp.py from its last line to its first."""

from functools import partial

from lorawgpu.backward.linear import project_backward, renorm
from lorawgpu.model.mlp import gate
from lorawgpu.ops.gate import gate_backward
from lorawgpu.ops.rmsnorm import rmsnorm_backward


def down_backward(c, layer, dx, s, *, below: bool):
    """From dx [rows, C] (the gradient of x2) to dgu, which is returned; None when nothing below needs it."""
    width, group, norm = c.config.intermediate_size, c.group(layer, "down"), layer.ffn_sub_norm
    m = gate(c, layer, s) if norm or group else None
    rstd = c.work.take((c.rows,), label="rstd_m") if norm else None
    n, scratch = renorm(c, m, norm, rstd, width, "norm m") if norm else (m, ())
    dm = c.take(c.widths.mlp, "dm") if below else None
    project_backward(c, layer, "down", dm, dx, lambda: (n, scratch), s, width=width)
    if scratch and not group:
        c.work.give(*scratch)
    dgu = None
    if below:
        if norm:
            dn, dm = dm, c.take(c.widths.mlp, "dm")
            rmsnorm_backward(c.plan, dm, dn, m, norm, rstd, rows=c.rows, width=width, accumulate=False)
            c.work.give(dn)
        dgu = c.take(2 * c.widths.mlp, "dgate_up")
        gate_backward(c.plan, dgu, dm, s.gu, rows=c.rows, width=width, act=c.config.act)
        c.work.give(dm)
    c.work.give(*(t for t in (m, rstd) if t))
    return dgu


def gate_up_backward(c, layer, dx, dgu, s, *, below: bool):
    """dx += the gradient that reaches x1 through the feed-forward; frees dgu."""
    width = c.config.hidden_size
    dn = c.take(c.widths.hidden, "dnorm") if below else None
    source = partial(renorm, c, s.x1, layer.post_attention_layernorm, s.rstd_post, width, "norm x1")
    project_backward(c, layer, "gate_up", dn, dgu, source, s, width=width)
    c.work.give(dgu)
    if below:
        rmsnorm_backward(
            c.plan, dx, dn, s.x1, layer.post_attention_layernorm, s.rstd_post, rows=c.rows, width=width, accumulate=True
        )
        c.work.give(dn)
