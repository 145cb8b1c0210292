"""Gradient of the feed-forward mixer; mirrors model/mlp.py."""

from lorawgpu.ops.gate import gate_backward


def mix_backward(c, layer, dm, s):
    """Return the gradient of the fused projection g | u, given dm. Frees dm."""
    dgu, spec = c.take(2 * layer.widths.mlp, "dgate_up"), layer.spec.mlp
    gate_backward(c.plan, dgu, dm, s.gu, rows=c.rows, width=spec.width, act=spec.act)
    c.work.give(dm)
    return dgu
