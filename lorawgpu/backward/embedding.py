"""Gradient of what an adapter trains of the embedding; mirrors model/embedding.py."""

from lorawgpu.families.modules import EMBEDDING
from lorawgpu.model.embedding import lora_h
from lorawgpu.ops.matmul import Epilogue, Operand, Problem, split_matmul, splits_by_length
from lorawgpu.ops.token_rows import rows_backward


def embedding_backward(c, dx) -> None:
    """Gradients +=, given dx [rows, C], that of the embedding."""
    adapter, layout, ids = c.adapter, c.adapter.layout, c.batch.ids
    shape, scale = {"rows": c.rows, "width": c.config.hidden_size}, c.config.embed_scale
    if EMBEDDING in layout.matrices:
        for (first, _), part in adapter.rows_of(adapter.grads, EMBEDDING):
            rows_backward(c.plan, part, dx, ids, c.batch.order, scale=scale, first=first, **shape)
    if tokens := layout.tokens.get(EMBEDDING):
        row_of, part = adapter.ids[EMBEDDING][1], tokens.slot.of(adapter.grads)
        rows_backward(c.plan, part, dx, ids, c.batch.order, scale=scale, row_of=row_of, **shape)
    if layout.embedding_lora:
        _lora_backward(c, layout.embedding_lora, dx)


def _lora_backward(c, lora, dx) -> None:
    """dB += dx^T h; dh = scale dx B; dA^T[id] += dh."""
    params, grads, width = c.adapter.params, c.adapter.grads, dx.shape[1]
    h, dh = lora_h(c, lora, c.batch.ids), c.take(lora.rank, "dh embedding")
    out, epilogue = Operand(lora.b.of(grads)), Epilogue(accumulate=True)
    problem = Problem(width, lora.rank, c.rows, out, Operand(dx).T, Operand(h), epilogue)
    split_matmul(c.plan, c.work, problem, splits_by_length(c.rows))
    b, epilogue = Operand(lora.b.of(params)), Epilogue(alpha=lora.scale * c.config.embed_scale)
    problem = Problem(c.rows, lora.rank, width, Operand(dh), Operand(dx), b, epilogue)
    split_matmul(c.plan, c.work, problem, splits_by_length(width))
    rows = {"rows": c.rows, "width": lora.rank}
    rows_backward(c.plan, lora.a.of(grads), dh, c.batch.ids, c.batch.order, **rows)
    c.work.give(h, dh)
