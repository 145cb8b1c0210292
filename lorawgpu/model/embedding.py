"""The embedding, with what an adapter trains of it. The gradient: backward/embedding.py."""

from lorawgpu.families.modules import EMBEDDING
from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.embedding import embedding_forward
from lorawgpu.ops.matmul import Epilogue, Operand, Problem, matmul
from lorawgpu.ops.stores import F32
from lorawgpu.ops.token_rows import rows_forward
from lorawgpu.ops.weight import Part


def embed(c, x: Tensor, ids: Tensor) -> None:
    """x [rows, C] = the embedding of `ids`."""
    shape, scale = {"rows": c.rows, "width": c.config.hidden_size}, c.config.embed_scale
    embedding_forward(c.plan, x, ids, c.embedding.parts, vocab=c.config.vocab_size, scale=scale, **shape)
    layout = c.adapter.layout if c.adapter else None
    if layout and (tokens := layout.tokens.get(EMBEDDING)):
        _, row_of = c.adapter.ids[EMBEDDING]
        rows_forward(c.plan, x, ids, row_of, tokens.slot.of(c.adapter.params), scale=scale, **shape)
    if layout and (lora := layout.embedding_lora):
        h = lora_h(c, lora, ids)
        b, epilogue = Operand(lora.b.of(c.adapter.params)), Epilogue(accumulate=True)
        matmul(c.plan, Problem(c.rows, x.shape[1], lora.rank, Operand(x), Operand(h), b.T, epilogue, few_terms=True))
        c.work.give(h)


def lora_h(c, lora, ids: Tensor) -> Tensor:
    """h [rows, rank] = scale A^T[ids], in scratch."""
    h, a = c.take(lora.rank, "h embedding"), lora.a.of(c.adapter.params)
    part = Part(0, a.shape[0], a, F32)
    options = {"rows": c.rows, "width": lora.rank, "vocab": c.config.vocab_size}
    embedding_forward(c.plan, h, ids, (part,), scale=lora.scale * c.config.embed_scale, **options)
    return h
