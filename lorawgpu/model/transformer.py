"""The forward pass: embedding, then blocks. The objective, or generation, adds the head."""

from lorawgpu.model.block import block_forward
from lorawgpu.model.embedding import embed
from lorawgpu.model.saved import Saved, SharedSaved, take_h

EMBED = "forward"  # the section of a plan that begins with the embedding


def transformer_forward(c, checkpointing: bool):
    """Record embedding and blocks, each layer in a section of its own. Returns the last hidden state and, for each
    layer, what its backward needs.

    With checkpointing a layer keeps only its input, and all layers share the other buffers.
    """
    x, saved, caches = c.keep(c.hidden, "x"), [], SharedCaches(c)
    shared = SharedSaved(c) if checkpointing else None
    embed(c, x, c.batch.ids)
    c.embedded = x
    for layer in c.model.layers:
        with c.plan.section(forward_section(layer.index)), c.plan.scope(f"layers.{layer.index}"):
            cache = caches.of(layer)
            s = shared.take(layer, cache) if checkpointing else Saved.take(c, layer, cache)
            s.x, s.h = x, take_h(c, layer)
            x = c.keep(c.hidden, "x")
            block_forward(c, layer, s.x, x, s)
            saved.append(s)
    return x, saved


def forward_section(layer: int) -> str:
    """The section of a layer's forward in a training plan, before which its adapter must be there."""
    return f"forward {layer}"


def infer_forward(c, caches=None):
    """Record embedding and blocks without a backward; only the KV cache is kept. Returns the last hidden state.

    caches: (k, v) of each layer. None if nothing reads them afterwards: layers then share one, but for those that
    another layer reads.
    """
    x, shared, kept = c.take(c.hidden, "x"), SharedSaved(c), SharedCaches(c)
    embed(c, x, c.batch.ids)
    c.embedded = x
    for layer in c.model.layers:
        with c.plan.scope(f"layers.{layer.index}"):
            s = shared.take(layer, caches[layer.index] if caches else kept.of(layer))
            s.h = take_h(c, layer)
            y = c.take(c.hidden, "x")
            block_forward(c, layer, x, y, s)
            c.work.give(*s.h.values())
            if x is not c.embedded or not c.config.per_layer_input:
                c.work.give(x)
            x = y
    return x


class SharedCaches:
    """The keys and values that several layers of a plan read: those of the layers that others name in `shares`."""

    def __init__(self, c):
        self.c, self.kept = c, {}
        shares = (layer.spec.attention.shares for layer in c.model.layers)
        self.producers = {index for index in shares if index is not None}

    def of(self, layer):
        """(k, v) of a layer that shares them, None for any other."""
        shares, width = layer.spec.attention.shares, layer.widths.kv
        if shares is not None:
            return self.kept[shares]
        if layer.index not in self.producers:
            return None
        self.kept[layer.index] = self.c.keep(width, "shared k"), self.c.keep(width, "shared v")
        return self.kept[layer.index]
