"""The head and the loss, on target rows alone and chunk by chunk: full logits never exist.

logits = rmsnorm(x[rows], norm) @ head^T;  loss = sum of cross-entropies;  dx[rows] = the gradient, other rows 0
"""

from dataclasses import dataclass

from ..gpu.tensor import Tensor, padded
from ..ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum
from ..ops.gather import gather_backward, gather_forward
from ..ops.linear import linear_backward, linear_forward
from ..ops.rmsnorm import rmsnorm_backward, rmsnorm_forward

CHUNK_ALIGN = 64  # rows of a chunk: whole tiles of the head's product
LOGITS_BUDGET = 256 << 20  # bytes of logits that exist at once


@dataclass(frozen=True)
class Head:
    """Scratch of one chunk of target rows, shared by all chunks."""

    chunk: int
    x: Tensor  # [chunk, C] gathered
    n: Tensor  # [chunk, C] normalised; then its gradient
    rstd: Tensor
    logits: Tensor  # [chunk, V]; then their gradient
    losses: Tensor  # of all targets

    @staticmethod
    def take(c, max_binding: int) -> "Head":
        """The chunk is as long as the budget, a binding and the rows of the plan allow."""
        hidden, vocab = c.widths.hidden, c.model.head.rows
        fits = min(LOGITS_BUDGET, max_binding) // (4 * vocab) // CHUNK_ALIGN * CHUNK_ALIGN
        chunk = max(CHUNK_ALIGN, min(fits, padded(c.rows, CHUNK_ALIGN)))
        return Head(
            chunk,
            c.work.take((chunk, hidden), label="head x"),
            c.work.take((chunk, hidden), label="head n"),
            c.work.take((chunk,), label="head rstd"),
            c.work.take((chunk, vocab), label="logits"),
            c.work.take(c.batch.target_ids.shape, label="losses"),
        )

    def give(self, c):
        """Nothing after the heads of a micro-batch reads these."""
        c.work.give(self.x, self.n, self.rstd, self.logits, self.losses)


def head_forward(c, head, x, start):
    """Logits of target rows [start, start + chunk) of x, into head.logits; those of zeros past the last target."""
    cfg, shape = c.config, {"rows": head.chunk, "width": c.config.hidden_size}
    gather_forward(c.plan, head.x, x, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
    rmsnorm_forward(c.plan, head.n, head.rstd, head.x, c.model.norm, eps=cfg.rms_norm_eps, **shape)
    linear_forward(c.plan, head.logits, head.n, c.model.head, rows=head.chunk)


def chunk_loss(c, head, x, dx, loss, start):
    """Add the loss of target rows [start, start + chunk) to `loss`; with dx, write the gradient of those rows there."""
    shape = {"rows": head.chunk, "width": c.config.hidden_size}
    head_forward(c, head, x, start)
    cross_entropy = cross_entropy_forward_backward if dx else cross_entropy_forward
    cross_entropy(
        c.plan,
        head.losses,
        head.logits,
        c.batch.target_ids,
        c.state,
        start=start,
        rows=head.chunk,
        vocab=c.config.vocab_size,
        record_id=c.watch.id("loss"),
    )
    loss_sum(c.plan, loss, head.losses, start=start, rows=head.chunk)
    if dx:
        linear_backward(c.plan, c.work, head.n, head.logits, c.model.head, rows=head.chunk)
        dgathered = c.work.take(head.x.shape, label="dhead x")
        rmsnorm_backward(c.plan, dgathered, head.n, head.x, c.model.norm, head.rstd, accumulate=False, **shape)
        gather_backward(c.plan, dx, dgathered, c.batch.target_rows, c.batch.target_ids, start=start, **shape)
        c.work.give(dgathered)
