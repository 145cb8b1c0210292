"""The cross-entropy of a chunk of target rows, and its gradient in place of the logits."""

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward


def chunk_losses(c, head, losses, start, rows, *, gradient: bool, row_weights: Tensor | None = None):
    """Write the losses of target rows [start, start + rows) from their logits; `gradient` turns logits into dlogits.

    losses: f32, one for each target row of the batch. row_weights: same shape, multiplies loss and gradient.
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
        softcap=c.config.final_softcap or 0.0,
    )
