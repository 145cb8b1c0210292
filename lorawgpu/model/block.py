"""One decoder block: the attention half, the feed-forward half, and in some models one for the per-layer input."""

from lorawgpu.model.attention import ATTENTION
from lorawgpu.model.mlp import MLP
from lorawgpu.model.per_layer import PER_LAYER
from lorawgpu.model.sublayer import Mixer, down_forward, up_forward


def mixers(layer) -> tuple[Mixer, ...]:
    """The mixers of a layer in forward order."""
    return (ATTENTION, MLP, PER_LAYER) if layer.spec.per_layer_input else (ATTENTION, MLP)


def block_forward(c, layer, x, out, s):
    """Write out [rows, C] from x [rows, C], and what the backward needs into `s` (saved.Saved)."""
    last = _all_but_last(c, layer, x, s)
    down_forward(c, layer, mixers(layer)[-1], last, out, s, layer.scalar)


def block_recompute(c, layer, x, s):
    """Recompute what the backward reads: everything but the last projection, unless a norm follows it."""
    last, mixer = _all_but_last(c, layer, x, s), mixers(layer)[-1]
    if mixer.out_norm in layer.norms:
        out = c.take(c.hidden, "x")
        down_forward(c, layer, mixer, last, out, s)
        c.work.give(out)


def _all_but_last(c, layer, x, s):
    """All of the block but the rest of its last half, whose input is returned."""
    *before, last = mixers(layer)
    for mixer, out in zip(before, s.between(), strict=True):
        up_forward(c, layer, mixer, x, s)
        down_forward(c, layer, mixer, x, out, s)
        x = out
    up_forward(c, layer, last, x, s)
    return x
