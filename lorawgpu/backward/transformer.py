"""The backward pass through the blocks, from the last block down to the first that has an adapter, or the embedding."""

from lorawgpu.backward.block import block_backward
from lorawgpu.backward.embedding import embedding_backward
from lorawgpu.lora.layout import BELOW
from lorawgpu.model.block import block_recompute


def transformer_backward(c, dx, saved, checkpointing: bool) -> list[str]:
    """Record the gradients of all blocks, each layer in a section of its own; returns the sections in their order.

    dx: the gradient of the last hidden state; it is overwritten.
    """
    last, sections = len(c.model.layers) - 1, []
    for layer in reversed(c.model.layers):
        if layer.index < c.adapter.layout.first_trainable_group()[0]:
            break
        s = saved[layer.index]
        sections.append(backward_section(layer.index))
        with c.plan.section(sections[-1]), c.plan.scope(f"layers.{layer.index}"):
            if checkpointing and layer.index < last:  # the last layer's activations are still there from the forward
                block_recompute(c, layer, s.x, s)
            block_backward(c, layer, dx, s)
    if c.adapter.layout.trains_embedding:
        sections.append(backward_section(BELOW))
        with c.plan.section(sections[-1]), c.plan.scope("embedding"):
            embedding_backward(c, dx)
    return sections


def backward_section(layer: int) -> str:
    """The section after which the adapter's gradients of a layer, and of all layers above it, are complete."""
    return f"backward {layer}"
