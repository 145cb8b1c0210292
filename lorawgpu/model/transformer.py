"""The forward walk: embedding, blocks; the head is the loss's business (backward/loss.py) and generation's."""

from lorawgpu.model.block import block_forward
from lorawgpu.model.saved import Saved, take_h
from lorawgpu.ops.embedding import embedding_forward


def embed(c, x):
    """x [rows, C] = the embedding of the batch's ids."""
    shape = {"rows": c.rows, "width": c.config.hidden_size}
    embedding_forward(c.plan, x, c.batch.ids, c.model.embedding.parts, scale=c.config.embed_scale, **shape)


def transformer_forward(c, checkpointing: bool):
    """Record embedding and blocks. Returns the last hidden state and, per layer, what its backward needs.

    With checkpointing every layer keeps its input alone and all share the buffers of one `Saved`.
    """
    x, saved = c.keep(c.widths.hidden, "x"), []
    embed(c, x)
    for layer in c.model.layers:
        with c.plan.scope(f"layers.{layer.index}"):
            s = Saved.take(c, layer) if not checkpointing or not saved else share(c, layer, saved[0])
            s.x = x
            x = c.keep(c.widths.hidden, "x")
            block_forward(c, layer, s.x, x, s)
            saved.append(s)
    return x, saved


def share(c, layer, first: Saved) -> Saved:
    """The buffers of `first` for another layer; its adapters may be others, so h is its own."""
    return Saved(**{**first.__dict__, "x": None, "h": take_h(c, layer)})


def infer_forward(c, x, caches, s: Saved):
    """Blocks for generation and evaluation: nothing is kept but the KV cache. x is updated; returns the last hidden."""
    for layer, (k, v) in zip(c.model.layers, caches, strict=True):
        with c.plan.scope(f"layers.{layer.index}"):
            s.k, s.v = k, v
            c.work.give(*s.h.values())
            s.h = take_h(c, layer)
            y = c.take(c.widths.hidden, "x")
            block_forward(c, layer, x, y, s)
            c.work.give(x)
            x = y
    return x
