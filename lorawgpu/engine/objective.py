"""What training minimizes: from the hidden states and targets of a micro-batch to a gradient and to metrics.

The engine records the transformer; between its forward and its backward an objective records the head, in as many
passes over the chunks of target rows as it needs.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from lorawgpu.backward.loss import Head, chunk_losses, head_backward, head_forward
from lorawgpu.data.batching import MicroBatch
from lorawgpu.gpu import Device, Tensor
from lorawgpu.model.context import Context
from lorawgpu.ops.cross_entropy import loss_sum

Totals = dict[str, Tensor]  # u32 [2] each, a number in fixed point (ops.cross_entropy.loss_sum)
Sections = Callable[[int], list[str]]  # names of what to replay, in order, for a number of target rows


class Objective(Protocol):
    """An engine makes its own with `objective(device, targets)`; `targets` is the most target rows of a micro-batch.

    sums: names of the totals of a step or an evaluation; "loss" is the first.
    base_first: each micro-batch first passes through the bare base model, recorded with `totals` None. What later
        passes need of it (the log-probabilities of a reference model, say) goes into buffers of the objective.
    """

    sums: tuple[str, ...]
    base_first: bool

    def write(self, batch: MicroBatch) -> None:
        """Put on the device what the objective needs of a micro-batch besides its target rows and ids."""

    def record(self, c: Context, head: Head, x: Tensor, dx: Tensor | None, totals: Totals | None) -> Sections:
        """Record the head's sections of a plan, with `head.record` and `c.plan.section`.

        x: the last hidden states, f32 [rows, C]. dx: their gradient, zeros of the same shape, of which target rows are
        to be written; None for an evaluation. totals: by name of `sums`, to be added to. c.adapter is None
        where the adapter is off.
        """

    def divisor(self, batch: MicroBatch) -> int:
        """A micro-batch's share of the number that the sums and the gradient of the whole step are divided by."""

    def metrics(self, sums: dict[str, float], divisor: int) -> dict[str, float]:
        """What a step or an evaluation reports: "loss", and others by name."""


class CausalLM:
    """Mean cross-entropy over target tokens; `weighted` multiplies each by the batch's row_weights first.

    The divisor counts target tokens, whatever they weigh.
    """

    sums = ("loss",)
    base_first = False

    def __init__(self, device: Device, targets: int, weighted: bool = False):
        self.device = device
        self.row_weights = device.tensor((targets,), label="row weights", kind="step") if weighted else None

    def write(self, batch: MicroBatch) -> None:
        if self.row_weights is None:
            if batch.row_weights is not None:
                raise ValueError("a micro-batch has row weights, and the objective is an unweighted CausalLM")
            return
        weights = np.ones(self.row_weights.size, np.float32)
        if batch.row_weights is not None:
            weights[: batch.targets] = batch.row_weights
        self.device.write(self.row_weights, weights)

    def record(self, c: Context, head: Head, x: Tensor, dx: Tensor | None, totals: Totals | None) -> Sections:
        def chunk(start, rows):
            head_forward(c, head, x, start, rows)
            gradient = dx is not None
            chunk_losses(c, head, head.losses, start, rows, gradient=gradient, row_weights=self.row_weights)
            loss_sum(c.plan, totals["loss"], head.losses, start=start, rows=rows)
            if gradient:
                head_backward(c, head, dx, start, rows)

        head.record(c, chunk)
        return head.sections

    def divisor(self, batch: MicroBatch) -> int:
        return batch.targets

    def metrics(self, sums: dict[str, float], divisor: int) -> dict[str, float]:
        return {"loss": sums["loss"] / divisor}
