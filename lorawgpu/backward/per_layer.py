"""Gradient of the mixer of the per-layer input; mirrors model/per_layer.py."""

from lorawgpu.model.per_layer import gate_options
from lorawgpu.ops.gate import gate_backward


def mix_backward(c, layer, dm, s):
    """Return the gradient of g, given dm. Frees dm."""
    dg = c.take(dm.shape[1], "d per-layer gate")
    gate_backward(c.plan, dg, dm, s.ple_gate, rows=c.rows, **gate_options(layer, s))
    c.work.give(dm)
    return dg
