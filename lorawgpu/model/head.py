"""The head: logits = rmsnorm(x, norm) @ head^T, in training on target rows only and in chunks.

Full logits never exist. The objective (engine/objective.py) decides how often it goes over the chunks, and what it does
with each. The gradient: backward/head.py.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from lorawgpu.families.modules import HEAD
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.gather import gather_forward
from lorawgpu.ops.linear import linear_forward
from lorawgpu.ops.lora import lora_down, lora_up
from lorawgpu.ops.matmul import Operand, Problem, split_matmul, splits_by_length
from lorawgpu.ops.rmsnorm import rmsnorm_forward
from lorawgpu.ops.softcap import softcap_forward
from lorawgpu.ops.token_rows import columns_forward

CHUNK_ALIGN = 64  # a chunk has a multiple of this many rows: whole tiles of the head's product
LOGITS_BUDGET = 512 << 20  # most bytes of logits at any time
TAIL_SIZES = 4  # the last chunk is recorded at 1/4, 2/4, 3/4 and all of a chunk, so less than a quarter is idle


@dataclass(frozen=True)
class HeadAdapter:
    """What an adapter trains of the head, apart from all of it, and its scratch; LoRA or rows, or neither."""

    group: object = None  # GroupLayout of LoRA
    h: Tensor | None = None  # [rows, rank]
    rows: Tensor | None = None  # [padded(n), C] trained rows
    ids: Tensor | None = None  # theirs
    columns: Tensor | None = None  # [rows, padded(n)] their logits

    @staticmethod
    def take(c, rows: int) -> "HeadAdapter":
        if not c.adapter:
            return HeadAdapter()
        layout = c.adapter.layout
        if group := layout.head:
            return HeadAdapter(group, c.work.take((rows, group.rank), label="h head"))
        if tokens := layout.tokens.get(HEAD):
            columns = c.work.take((rows, tokens.slot.stored[0]), label="trained logits")
            return HeadAdapter(rows=tokens.slot.of(c.adapter.params), ids=c.adapter.ids[HEAD][0], columns=columns)
        return HeadAdapter()

    def give(self, c) -> None:
        c.work.give(*(tensor for tensor in (self.h, self.columns) if tensor))


@dataclass(frozen=True)
class Head:
    """Scratch for one chunk of target rows, shared by all chunks. A span is a chunk's (start, rows)."""

    chunk: int  # rows
    x: Tensor  # [chunk, C] gathered
    n: Tensor  # [chunk, C] normalized; later its gradient
    rstd: Tensor
    logits: Tensor  # [chunk, V]; later their gradient
    losses: Tensor  # one for each target row of the batch
    adapter: HeadAdapter = HeadAdapter()

    @staticmethod
    def take(c, max_binding: int) -> "Head":
        """Take scratch for chunks of equal length, as few as the budget and a binding allow in the largest plan.

        Smaller plans use chunks no longer than that, because they reuse the largest plan's buffers.
        """
        hidden, vocab, largest = c.hidden, c.model.head.rows, c.batch.target_ids.size
        fits = max(1, min(LOGITS_BUDGET, max_binding) // (4 * vocab * CHUNK_ALIGN)) * CHUNK_ALIGN
        chunk = padded(min(c.rows, -(-largest // -(-largest // fits))), CHUNK_ALIGN)
        return Head(
            chunk,
            c.work.take((chunk, hidden), label="head x"),
            c.work.take((chunk, hidden), label="head n"),
            c.work.take((chunk,), label="head rstd"),
            c.work.take((chunk, vocab), label="logits"),
            c.work.take(c.batch.target_ids.shape, label="losses"),
            HeadAdapter.take(c, chunk),
        )

    def spans(self, targets: int) -> list[tuple[int, int]]:
        """The chunks for `targets` target rows: full ones, then the shortest tail that holds the rest."""
        whole, rest = divmod(targets, self.chunk)
        spans = [(i * self.chunk, self.chunk) for i in range(whole)]
        if rest:
            quarters = (padded(-(-self.chunk * i // TAIL_SIZES), CHUNK_ALIGN) for i in range(1, TAIL_SIZES + 1))
            spans.append((whole * self.chunk, next(rows for rows in quarters if rows >= rest)))
        return spans

    def all_spans(self, rows: int) -> list[tuple[int, int]]:
        """Every chunk that any number of targets up to `rows` may need, full ones first."""
        counts = range(CHUNK_ALIGN, padded(rows, CHUNK_ALIGN) + 1, CHUNK_ALIGN)
        return sorted({span for targets in counts for span in self.spans(targets)}, key=lambda s: (-s[1], s[0]))

    def sections(self, targets: int, name: str = "head") -> list[str]:
        """Names of the sections recorded by `record` for `targets` target rows."""
        return [section_name(name, *span) for span in self.spans(targets)]

    def record(self, c, record: Callable, name: str = "head"):
        """Record one pass over the chunks: call `record(start=, rows=)` in a section of its own for each chunk.

        Tails come last and reuse the workspace buffers of the full chunks.
        """
        for start, rows in self.all_spans(c.rows):
            reuse_only = c.work.reuse_only() if rows < self.chunk else nullcontext()
            with c.plan.section(section_name(name, start, rows)), c.plan.scope(name), reuse_only:
                record(start=start, rows=rows)

    def give(self, c):
        """Give the scratch back. Nothing reads it after the head of a micro-batch."""
        c.work.give(self.x, self.n, self.rstd, self.logits, self.losses)
        self.adapter.give(c)


def section_name(name: str, start: int, rows: int) -> str:
    """The section name of the chunk of target rows [start, start + rows) in a pass."""
    return f"{name} {start}+{rows}"


def head_forward(c, head, x, start, rows):
    """Write the logits of target rows [start, start + rows) to head.logits, from row 0 on. Unused rows read x as 0."""
    shape = {"rows": rows, "width": c.config.hidden_size}
    gather_forward(c.plan, head.x, x, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    logits_forward(c, head.logits.rows(0, rows), head.n, head.rstd, head.x, rows, head.adapter, start)


def capped_head_forward(c, head, x, start, rows):
    """`head_forward` for logits that are read back: with the model's soft cap, which the loss applies by itself."""
    head_forward(c, head, x, start, rows)
    cap_logits(c, head.logits.rows(0, rows), rows)


def cap_logits(c, logits, rows):
    """Apply the model's soft cap, if it has one, to logits [rows, V] in place."""
    if c.config.final_softcap:
        softcap_forward(c.plan, logits, rows=rows, vocab=c.config.vocab_size, cap=c.config.final_softcap)


def logits_forward(c, logits, n, rstd, x, rows, adapter: HeadAdapter, first_row=0):
    """logits [rows, V] of the hidden states x [rows, C]; n [rows, C] and rstd [rows] are kept for the backward.

    first_row: for dropout, the number of row 0 among the target rows.
    """
    shape, lora = {"rows": rows, "width": c.config.hidden_size}, None
    rmsnorm_forward(c.plan, n, rstd, x, c.model.norm, eps=c.config.rms_norm_eps, **shape)
    if group := adapter.group:
        options = {"step": c.step, "p": c.dropout, "first_row": first_row}
        lora_down(c.plan, c.work, adapter.h, n, group, c.adapter.params, **shape, **options)
        lora = lora_up(group, adapter.h, c.adapter.params)
    linear_forward(c.plan, logits, n, c.head, rows=rows, lora=lora)
    trained_logits(c, logits, n, rows, adapter)


def trained_logits(c, logits, n, rows, adapter: HeadAdapter):
    """Replace the logits of the tokens whose rows of the head are trained; n [rows, C], normalized."""
    if not adapter.columns:
        return
    count, width = adapter.rows.shape
    problem = Problem(rows, count, width, Operand(adapter.columns), Operand(n), Operand(adapter.rows).T)
    split_matmul(c.plan, c.work, problem, splits_by_length(width))
    columns_forward(c.plan, logits, adapter.columns, adapter.ids, rows=rows)
