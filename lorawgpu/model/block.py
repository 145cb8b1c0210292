"""One decoder block: the attention half, then the feed-forward half (model/sublayer.py)."""

from lorawgpu.model.attention import ATTENTION
from lorawgpu.model.mlp import MLP
from lorawgpu.model.sublayer import down_forward, up_forward


def block_forward(c, layer, x, x2, s):
    """Write x2 [rows, C] from x [rows, C], and what the backward needs into `s` (saved.Saved)."""
    _all_but_last(c, layer, x, s)
    down_forward(c, layer, MLP, s.x1, x2, s)


def block_recompute(c, layer, x, s):
    """Recompute what the backward reads: everything but the last projection, unless a norm follows it."""
    _all_but_last(c, layer, x, s)
    if MLP.out_norm in layer.norms:
        x2 = c.take(c.hidden, "x2")
        down_forward(c, layer, MLP, s.x1, x2, s)
        c.work.give(x2)


def _all_but_last(c, layer, x, s):
    up_forward(c, layer, ATTENTION, x, s)
    down_forward(c, layer, ATTENTION, x, s.x1, s)
    up_forward(c, layer, MLP, s.x1, s)
