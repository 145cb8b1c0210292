"""One decoder block, as the equations of the model read: attention, then feed-forward, each added to the stream."""

from lorawgpu.model.attention import attention_block_forward
from lorawgpu.model.mlp import down_forward, gate_up_forward


def block_forward(c, layer, x, x2, s):
    """x2 [rows, C] from x [rows, C]; what the backward needs goes to `s` (saved.Saved)."""
    block_recompute(c, layer, x, s)
    down_forward(c, layer, x2, s)


def block_recompute(c, layer, x, s):
    """All of the block that the backward reads: everything but the last projection."""
    attention_block_forward(c, layer, x, s)
    gate_up_forward(c, layer, s)
