"""Gradient of one decoder block: model/block.py in reverse."""

from lorawgpu.backward.sublayer import down_backward, up_backward
from lorawgpu.families.spec import GROUPS
from lorawgpu.model.attention import ATTENTION
from lorawgpu.model.mlp import MLP


def block_backward(c, layer, dx, s):
    """dx [rows, C], the gradient of the block's output, becomes that of its input; adapter gradients +=.

    Stops at the lowest adapter of the model: nobody reads a gradient below it.
    """
    lowest = c.adapter.layout.lowest()
    below = {name: (layer.index, i) > lowest for i, name in enumerate(GROUPS)}
    for mixer, x in ((MLP, s.x1), (ATTENTION, s.x)):
        dm = down_backward(c, layer, mixer, dx, s, below=below[mixer.down])
        if not below[mixer.down]:
            return
        up_backward(c, layer, mixer, dx, dm, x, s, below=below[mixer.up])
        if not below[mixer.up]:
            return
