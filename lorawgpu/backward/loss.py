"""The head and the loss, on target rows alone and chunk by chunk: full logits never exist.

logits = rmsnorm(x[rows], norm) @ head^T;  loss = sum of cross-entropies;  dx[rows] = the gradient, other rows 0
"""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum
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
    n: Tensor  # [chunk, C] normalised; then its gradient
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

    def give(self, c):
        """Nothing after the heads of a micro-batch reads these."""
        c.work.give(self.x, self.n, self.rstd, self.logits, self.losses)


def head_forward(c, head, x, start, rows):
    """Logits of target rows [start, start + rows) of x, in the first rows of head.logits; of zeros past the last."""
    cfg, shape = c.config, {"rows": rows, "width": c.config.hidden_size}
    gather_forward(c.plan, head.x, x, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    rmsnorm_forward(c.plan, head.n, head.rstd, head.x, c.model.norm, eps=cfg.rms_norm_eps, **shape)
    linear_forward(c.plan, head.logits.rows(0, rows), head.n, c.model.head, rows=rows)


def chunk_loss(c, head, x, dx, loss, start, rows):
    """Add the loss of target rows [start, start + rows) to `loss`; with dx, write the gradient of those rows there."""
    shape = {"rows": rows, "width": c.config.hidden_size}
    logits = head.logits.rows(0, rows)
    head_forward(c, head, x, start, rows)
    cross_entropy = cross_entropy_forward_backward if dx else cross_entropy_forward
    cross_entropy(
        c.plan,
        head.losses,
        logits,
        c.batch.target_ids,
        c.state,
        start=start,
        rows=rows,
        vocab=c.config.vocab_size,
        record_id=c.non_finite.id("loss"),
    )
    loss_sum(c.plan, loss, head.losses, start=start, rows=rows)
    if dx:
        linear_backward(c.plan, c.work, head.n, logits, c.model.head, rows=rows)
        dgathered = c.work.take(head.x.shape, label="dhead x")
        rmsnorm_backward(c.plan, dgathered, head.n, head.x, c.model.norm, head.rstd, accumulate=False, **shape)
        gather_backward(c.plan, dx, dgathered, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
        c.work.give(dgathered)
