"""The forward pass: embedding, then blocks. The objective, or generation, adds the head."""

from lorawgpu.model.block import block_forward
from lorawgpu.model.saved import Saved, SharedSaved
from lorawgpu.ops.embedding import embedding_forward


def embed(c, x):
    """x [rows, C] = the embedding of the batch's ids."""
    shape = {"rows": c.rows, "width": c.config.hidden_size}
    embedding_forward(c.plan, x, c.batch.ids, c.model.embedding.parts, scale=c.config.embed_scale, **shape)


def transformer_forward(c, checkpointing: bool):
    """Record embedding and blocks. Returns the last hidden state and, for each layer, what its backward needs.

    With checkpointing a layer keeps only its input, and layers of one spec share all other buffers.
    """
    x, saved, shared = c.keep(c.hidden, "x"), [], SharedSaved()
    embed(c, x)
    for layer in c.model.layers:
        with c.plan.scope(f"layers.{layer.index}"):
            s = shared.take(c, layer) if checkpointing else Saved.take(c, layer)
            s.x = x
            x = c.keep(c.hidden, "x")
            block_forward(c, layer, s.x, x, s)
            saved.append(s)
    return x, saved


def infer_forward(c, caches=None):
    """Record embedding and blocks without a backward; only the KV cache is kept. Returns the last hidden state.

    caches: (k, v) of each layer. None if nothing reads them afterwards: layers of one spec then share one.
    """
    x, shared = c.take(c.hidden, "x"), SharedSaved()
    embed(c, x)
    for layer in c.model.layers:
        with c.plan.scope(f"layers.{layer.index}"):
            s = shared.take(c, layer, caches and caches[layer.index])
            y = c.take(c.hidden, "x")
            block_forward(c, layer, x, y, s)
            c.work.give(x, *s.h.values())
            x = y
    return x
