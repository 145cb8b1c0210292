"""Gradient of the feed-forward mixer; mirrors model/mlp.py."""

from lorawgpu.model.mlp import gate_options
from lorawgpu.ops.gate import gate_backward


def mix_backward(c, layer, dm, s):
    """Return the gradient of the fused projection g | u, given dm. Frees dm."""
    dgu = c.take(layer.widths.gate_up, "dgate_up")
    gate_backward(c.plan, dgu, dm, *s.gu, rows=c.rows, **gate_options(layer))
    c.work.give(dm)
    return dgu
