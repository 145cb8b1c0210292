"""Objectives: what the head computes from hidden states and targets, its gradient, and the reported metrics.

The engine records the transformer. Between forward and backward, an objective records the head, in as many passes over
the chunks of target rows as it needs.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from lorawgpu.backward.head import head_backward
from lorawgpu.backward.loss import chunk_losses
from lorawgpu.data.batching import MicroBatch
from lorawgpu.gpu import Device, Tensor
from lorawgpu.model.context import Context
from lorawgpu.model.head import Head, head_forward
from lorawgpu.ops.cross_entropy import loss_sum

Totals = dict[str, Tensor]  # u32 [2] each, fixed point (ops.cross_entropy.loss_sum)
Sections = Callable[[int], list[str]]  # number of target rows -> names of the sections to replay, in order


class Objective(Protocol):
    """Made by the engine as `objective(device, targets)`, with the most target rows of a micro-batch.

    sums: names of the totals of a step or an evaluation; the first is "loss".
    base_first: whether each micro-batch first passes through the bare base model, recorded with `totals` None. Results
        that later passes need, such as a reference model's log-probabilities, go into buffers of the objective.
    """

    sums: tuple[str, ...]
    base_first: bool

    def write(self, batch: MicroBatch) -> None:
        """Write to the device whatever the objective needs from a micro-batch, other than target rows and ids."""

    def record(self, c: Context, head: Head, x: Tensor, dx: Tensor | None, totals: Totals | None) -> Sections:
        """Record the head's sections of a plan, with `head.record` and `c.plan.section`.

        x: the last hidden states, f32 [rows, C]. dx: their gradient, zeros of the same shape, whose target rows must be
        written; None for an evaluation. totals: one per name in `sums`, to be added to. c.adapter is None if the
        adapter is off.
        """

    def divisor(self, batch: MicroBatch) -> int:
        """A micro-batch's contribution to the divisor of the whole step's sums and gradient."""

    def metrics(self, sums: dict[str, float], divisor: int) -> dict[str, float]:
        """The metrics that a step or an evaluation reports, by name; "loss" is one of them."""


class CausalLM:
    """Mean cross-entropy over target tokens; `weighted` multiplies each loss by the batch's row_weights.

    The divisor is the number of target tokens, whatever their weights.
    """

    sums = ("loss",)
    base_first = False

    def __init__(self, device: Device, targets: int, weighted: bool = False):
        self.device = device
        self.row_weights = device.tensor((targets,), label="row weights", kind="step") if weighted else None

    def write(self, batch: MicroBatch) -> None:
        if self.row_weights is None:
            if batch.row_weights is not None:
                raise ValueError("a micro-batch has row weights, but the objective is an unweighted CausalLM")
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
