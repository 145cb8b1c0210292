"""Gradient of one decoder block: model/block.py in reverse."""

from lorawgpu.backward.sublayer import half_backward
from lorawgpu.families.spec import GROUPS
from lorawgpu.model.block import mixers
from lorawgpu.ops.scale import scale_forward


def block_backward(c, layer, dx, s):
    """dx [rows, C], the gradient of the block's output, becomes that of its input; adapter gradients +=.

    Stops at the first group that has an adapter: nothing reads the gradient of its input.
    """
    first = c.adapter.layout.first_trainable_group()
    needs_dx = {name: (layer.index, i) > first for i, name in enumerate(GROUPS)}
    if layer.scalar != 1:
        scale_forward(c.plan, dx, rows=c.rows, width=layer.spec.hidden, scale=layer.scalar)
    inputs = [s.x, *s.between()]
    for mixer, x in zip(reversed(mixers(layer)), reversed(inputs), strict=True):
        half_backward(c, layer, mixer, dx, x, s, needs_dx)
        if not needs_dx[mixer.up]:
            return
