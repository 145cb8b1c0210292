"""The backward pass through the blocks, from the last block down to the first that has an adapter."""

from lorawgpu.backward.block import block_backward
from lorawgpu.model.block import block_recompute


def transformer_backward(c, dx, saved, checkpointing: bool):
    """Record the gradients of all blocks. dx: the gradient of the last hidden state; it is overwritten."""
    last = len(c.model.layers) - 1
    for layer in reversed(c.model.layers):
        if layer.index < c.adapter.layout.first_trainable_group()[0]:
            break
        s = saved[layer.index]
        with c.plan.scope(f"layers.{layer.index}"):
            if checkpointing and layer.index < last:  # the last layer's activations are still there from the forward
                block_recompute(c, layer, s.x, s)
            block_backward(c, layer, dx, s)
