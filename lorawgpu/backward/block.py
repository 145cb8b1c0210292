"""Gradient of one decoder block: model/block.py in reverse."""

from lorawgpu.backward.attention import o_backward, qkv_backward
from lorawgpu.backward.mlp import down_backward, gate_up_backward
from lorawgpu.lora.layout import GROUPS


def block_backward(c, layer, dx, s):
    """dx [rows, C], the gradient of the block's output, becomes that of its input; adapter gradients +=.

    Stops at the lowest adapter of the model: what lies below it would be work for nobody.
    """
    lowest = c.adapter.layout.lowest()
    below = {name: (layer.index, i) > lowest for i, name in enumerate(GROUPS)}
    dgu = down_backward(c, layer, dx, s, below=below["down"])
    if below["down"]:
        gate_up_backward(c, layer, dx, dgu, s, below=below["gate_up"])
    if below["gate_up"]:
        da = o_backward(c, layer, dx, s, below=below["o"])
    if below["o"]:
        qkv_backward(c, layer, dx, da, s, below=below["qkv"])
