"""The head and the cross-entropy, on target rows only and chunk by chunk: full logits never exist.

logits = rmsnorm(x[rows], norm) @ head^T;  losses = cross-entropies;  dx[rows] = the gradient of their sum, other rows 0

Which of these parts run, in how many passes over the chunks, and what is summed is the objective's choice
(engine/objective.py).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward
from lorawgpu.ops.gather import gather_backward, gather_forward
from lorawgpu.ops.linear import linear_backward, linear_forward
from lorawgpu.ops.rmsnorm import rmsnorm_backward, rmsnorm_forward

CHUNK_ALIGN = 64  # rows of a chunk: whole tiles of the head's product
LOGITS_BUDGET = 512 << 20  # bytes of logits that exist at once
TAILS = 4  # lengths that the last chunk of a micro-batch is recorded in: quarters, so that less than one is idle


@dataclass(frozen=True)
class Head:
    """Scratch of one chunk of target rows, shared by all chunks; a span is the (start, rows) of one."""

    chunk: int
    x: Tensor  # [chunk, C] gathered
    n: Tensor  # [chunk, C] normalized; then its gradient
    rstd: Tensor
    logits: Tensor  # [chunk, V]; then their gradient
    losses: Tensor  # of all targets

    @staticmethod
    def take(c, max_binding: int) -> "Head":
        """Chunks of one length, as few as the budget and a binding allow for the largest plan of an engine.

        A smaller plan has no longer ones: it must find room in the buffers of the largest.
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
        )

    def spans(self, targets: int) -> list[tuple[int, int]]:
        """The chunks that hold `targets` target rows: whole ones, then the shortest tail that holds the rest."""
        whole, rest = divmod(targets, self.chunk)
        spans = [(i * self.chunk, self.chunk) for i in range(whole)]
        if rest:
            quarters = (padded(-(-self.chunk * i // TAILS), CHUNK_ALIGN) for i in range(1, TAILS + 1))
            spans.append((whole * self.chunk, next(rows for rows in quarters if rows >= rest)))
        return spans

    def all_spans(self, rows: int) -> list[tuple[int, int]]:
        """Those of any number of targets up to `rows`, the whole ones first."""
        counts = range(CHUNK_ALIGN, padded(rows, CHUNK_ALIGN) + 1, CHUNK_ALIGN)
        return sorted({span for targets in counts for span in self.spans(targets)}, key=lambda s: (-s[1], s[0]))

    def sections(self, targets: int, name: str = "head") -> list[str]:
        """Names of the sections that `record` made for the chunks that hold `targets` target rows."""
        return [section_name(name, *span) for span in self.spans(targets)]

    def record(self, c, record: Callable, name: str = "head"):
        """One pass: `record(start=, rows=)` in a section for every chunk that a batch may need.

        Tails come last and use what the whole chunks left in the workspace.
        """
        for start, rows in self.all_spans(c.rows):
            frugal = c.work.frugal() if rows < self.chunk else nullcontext()
            with c.plan.section(section_name(name, start, rows)), c.plan.scope(name), frugal:
                record(start=start, rows=rows)

    def give(self, c):
        """Nothing after the heads of a micro-batch reads these."""
        c.work.give(self.x, self.n, self.rstd, self.logits, self.losses)


def section_name(name: str, start: int, rows: int) -> str:
    """The section of a pass that holds the chunk of target rows [start, start + rows)."""
    return f"{name} {start}+{rows}"


def head_forward(c, head, x, start, rows):
    """Logits of target rows [start, start + rows) of x, in the first rows of head.logits; of zeros past the last."""
    cfg, shape = c.config, {"rows": rows, "width": c.config.hidden_size}
    gather_forward(c.plan, head.x, x, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    rmsnorm_forward(c.plan, head.n, head.rstd, head.x, c.model.norm, eps=cfg.rms_norm_eps, **shape)
    linear_forward(c.plan, head.logits.rows(0, rows), head.n, c.model.head, rows=rows)


def chunk_losses(c, head, losses, start, rows, *, gradient: bool, row_weights: Tensor | None = None):
    """losses of target rows [start, start + rows) from their logits, which `gradient` turns into dlogits.

    losses: f32, one for each target row of the batch. row_weights: of that shape, multiplies loss and gradient.
    """
    cross_entropy = cross_entropy_forward_backward if gradient else cross_entropy_forward
    cross_entropy(
        c.plan,
        losses,
        head.logits.rows(0, rows),
        c.batch.target_ids,
        c.state,
        start=start,
        rows=rows,
        vocab=c.config.vocab_size,
        record_id=c.non_finite.id("loss"),
        row_weights=row_weights,
    )


def head_backward(c, head, dx, start, rows):
    """dx of target rows [start, start + rows) from the dlogits in head.logits, after `head_forward` of these rows."""
    shape = {"rows": rows, "width": c.config.hidden_size}
    linear_backward(c.plan, c.work, head.n, head.logits.rows(0, rows), c.model.head, rows=rows)
    dgathered = c.work.take(head.x.shape, label="dhead x")
    rmsnorm_backward(c.plan, dgathered, head.n, head.x, c.model.norm, head.rstd, accumulate=False, **shape)
    gather_backward(c.plan, dx, dgathered, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    c.work.give(dgathered)
