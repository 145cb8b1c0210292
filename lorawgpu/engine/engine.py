"""A model and its adapter on one device: plans recorded once per token capacity, then replayed.

begin; per micro-batch: write step data, forward, heads, backward; update
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lorawgpu.backward.loss import CHUNK_ALIGN, Head, chunk_loss, head_forward
from lorawgpu.backward.transformer import transformer_backward
from lorawgpu.data.batching import MicroBatch
from lorawgpu.gpu import KernelCache, Plan, Workspace
from lorawgpu.gpu.tensor import padded
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.model.context import AdapterBuffers, Context, NonFiniteIds, StepData
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.model.transformer import infer_forward, transformer_forward
from lorawgpu.ops.cross_entropy import loss_value
from lorawgpu.ops.hash import random_key
from lorawgpu.ops.step import pack_step, step_buffer
from lorawgpu.ops.window import State, begin_window, end_window, state_buffer, unpack_state
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.device_model import Model

IGNORED = -1  # a target id that marks an unused row


@dataclass(frozen=True)
class Options:
    """How the engine records: none of these changes the mathematics but dropout."""

    capacity: int  # rows of the largest micro-batch
    positions: int  # longest sequence
    dropout: float = 0.0
    seed: int = 0
    checkpointing: bool = False
    attention: str = "flash"
    flops_per_submit: float = float("inf")


@dataclass(frozen=True)
class Recorded:
    """The plan of one capacity, and where its results are."""

    plan: Plan
    rows: int
    head: Head

    def heads(self, targets: int) -> list:
        """Sections of the chunks that hold `targets` target rows."""
        return [head_section(*span) for span in self.head.spans(targets)]

    def flops(self, targets: int) -> float:
        """Floating-point operations of `train` with `targets` target rows, those of the products alone."""
        names = ("forward", *self.heads(targets), "backward")
        return sum(record.flops for name in names for record in self.plan.sections[name])


def head_section(start: int, rows: int) -> str:
    """The name of the section that holds the head for target rows [start, start + rows)."""
    return f"head {start}+{rows}"


class Engine:
    """Computes losses, gradients and optimizer steps. `adapter` is None for a bare base model."""

    def __init__(
        self,
        device,
        model: Model,
        options: Options,
        layout: AdapterLayout | None = None,
        tensors: dict | None = None,
        optimizer: AdamW | None = None,
        kernels: KernelCache | None = None,
    ):
        self.device, self.model, self.options, self.optimizer = device, model, options, optimizer
        self.kernels = kernels or KernelCache(device)
        self.work, self.non_finite = Workspace(device), NonFiniteIds()
        self.batch = StepData.create(device, options.capacity, padded(options.capacity, CHUNK_ALIGN))
        self.ropes = RopeTables(device, model.config, options.positions)
        self.state, self.step = state_buffer(device), step_buffer(device)
        self.loss = device.tensor((2,), "u32", "loss", "step")
        self.norm = device.tensor((1,), label="grad norm", kind="step")
        self.adapter = self._adapter(layout, tensors) if layout else None
        self._plans = {}
        if optimizer:
            self.plan("train", options.capacity)
        self._window = self._record_window()  # its id comes last: a bad tensor is named before the bad norm

    def _adapter(self, layout, tensors) -> AdapterBuffers:
        def flat(name, kind):
            return self.device.tensor((layout.size,), label=f"adapter {name}", kind=kind)

        training = [flat(n, "optimizer") for n in ("grads", "m", "v")] if self.optimizer else []
        buffers = AdapterBuffers(layout, flat("params", "adapter"), *training)
        self.device.write(buffers.params, layout.flatten(tensors))
        return buffers

    # Recording

    def _context(self, plan, rows, training) -> Context:
        return Context(
            plan,
            self.work,
            self.model,
            rows,
            self.batch.rows(rows),
            self.ropes,
            self.state,
            self.step,
            self.non_finite,
            self.adapter,
            self.options.dropout if training else 0.0,
            self.options.attention,
        )

    def plan(self, kind: str, rows: int) -> Recorded:
        """The plan of `kind` ("train", "eval" or "logits") for `rows` rows, recorded on first use.

        The first of an engine is one of its capacity: smaller ones find its buffers, larger ones would not.
        ValueError when `rows` is beyond the capacity that the engine was made for.
        """
        if rows > self.options.capacity:
            raise ValueError(f"{rows} rows exceed the capacity of {self.options.capacity}")
        if (kind, rows) not in self._plans:
            if not self._plans and rows < self.options.capacity:
                self.plan(kind, self.options.capacity)
            self.work.rewind()
            plan = Plan(self.device, self.kernels, self.options.flops_per_submit)
            c = self._context(plan, rows, kind == "train")
            record = {"train": self._record_train, "eval": self._record_eval, "logits": self._record_logits}[kind]
            self._plans[kind, rows] = Recorded(plan, rows, record(c))
        return self._plans[kind, rows]

    def _record_train(self, c) -> Head:
        with c.plan.section("forward"):
            x, saved = transformer_forward(c, self.options.checkpointing)
            dx = c.keep(c.hidden, "dx")
            c.plan.clear(dx)
        head = self._record_heads(c, partial(chunk_loss, c, x=x, dx=dx, loss=self.loss))
        head.give(c)
        with c.plan.section("backward"):
            transformer_backward(c, dx, saved, self.options.checkpointing)
        return head

    def _record_heads(self, c, record) -> Head:
        """`record(head=, start=, rows=)` for every chunk that a batch may need; tails use what the whole ones left."""
        head = Head.take(c, self.device.max_binding)
        for start, rows in head.all_spans(c.rows):
            frugal = c.work.frugal() if rows < head.chunk else nullcontext()
            with c.plan.section(head_section(start, rows)), c.plan.scope("head"), frugal:
                record(head=head, start=start, rows=rows)
        return head

    def _record_eval(self, c) -> Head:
        with c.plan.section("forward"):
            x = infer_forward(c)
        return self._record_heads(c, partial(chunk_loss, c, x=x, dx=None, loss=self.loss))

    def _record_logits(self, c) -> Head:
        with c.plan.section("forward"):
            x = infer_forward(c)
        return self._record_heads(c, partial(head_forward, c, x=x))

    def _record_window(self) -> Plan:
        plan = Plan(self.device, self.kernels)
        with plan.section("begin"):
            begin_window(plan, self.state, self.loss)
            if self.optimizer:
                plan.clear(self.adapter.grads)
        with plan.section("update"):
            if self.optimizer:
                self.optimizer.record(
                    plan, self.adapter, self.state, self.step, self.norm, record_id=self.non_finite.id("gradient norm")
                )
            end_window(plan, self.state)
        return plan

    def pace(self, flops: float):
        """Split the submits of all plans, those yet to be recorded included, into about `flops` operations each."""
        self.options = replace(self.options, flops_per_submit=flops)
        for plan in self.plans():
            plan.flops_per_submit = flops

    def plans(self) -> list[Plan]:
        """All plans recorded so far."""
        return [self._window, *(recorded.plan for recorded in self._plans.values())]

    def flops(self, batch: MicroBatch) -> float:
        """Floating-point operations of `train` on this micro-batch: none without targets."""
        return self.plan("train", batch.capacity).flops(batch.targets) if batch.targets else 0.0

    # Replaying

    def write(self, batch: MicroBatch):
        """Put the arrays of a micro-batch into the step data."""
        for name in ("ids", "position", "slot", "kv_start", "segment_end"):
            self.device.write(getattr(self.batch, name).view(0, (batch.capacity,)), getattr(batch, name))
        rows = np.zeros(self.batch.target_rows.size, np.int32)
        ids = np.full(self.batch.target_ids.size, IGNORED, np.int32)
        rows[: batch.targets], ids[: batch.targets] = batch.target_rows, batch.target_ids
        self.device.write(self.batch.target_rows, rows)
        self.device.write(self.batch.target_ids, ids)

    def begin(self):
        """Start an optimizer window, or an evaluation: gradients, loss and the bad flag are cleared."""
        self._window.run("begin")

    def train(self, batch: MicroBatch, step: int = 1, index: int = 0):
        """Add the gradient of one micro-batch, number `index` of the window of optimizer step `step` (from 1)."""
        if not batch.targets:
            return
        self.write(batch)
        if self.options.dropout:
            self.device.write(self.step, pack_step(key=random_key(self.options.seed, step, index)))
        recorded = self.plan("train", batch.capacity)
        recorded.plan.run("forward", *recorded.heads(batch.targets), "backward")

    def update(self, step: int, lr: float, targets: int):
        """Clip and apply AdamW with the mean gradient over `targets` target tokens; `step` counts from 1."""
        self.device.write(self.step, self.optimizer.step_values(step, lr, targets))
        self._window.run("update")

    def window(self, batches: list, step: int, lr: float) -> int:
        """One optimizer step over its micro-batches. Returns the target tokens; with none, nothing happens."""
        targets = sum(b.targets for b in batches)
        if targets:
            self.begin()
            for index, batch in enumerate(batches):
                self.train(batch, step, index)
            self.update(step, lr, targets)
        return targets

    def evaluate(self, batch: MicroBatch):
        """Add the loss of one micro-batch, without dropout and gradients. Call `begin` before the first."""
        if batch.targets:
            self.write(batch)
            recorded = self.plan("eval", batch.capacity)
            recorded.plan.run("forward", *recorded.heads(batch.targets))

    def logits(self, batch: MicroBatch, rows: np.ndarray) -> np.ndarray:
        """Logits of `rows` of a micro-batch, float32 [len(rows), V]."""
        self.write(replace(batch, target_rows=rows.astype(np.int32), target_ids=np.zeros(len(rows), np.int32)))
        recorded = self.plan("logits", batch.capacity)
        recorded.plan.run("forward")
        parts = []
        for start, count in recorded.head.spans(len(rows)):
            recorded.plan.run(head_section(start, count))
            parts.append(self.device.read(recorded.head.logits.rows(0, count)))
        return np.concatenate(parts)[: len(rows), : self.model.config.vocab_size]

    # Reading back

    def loss_sum(self) -> float:
        """Sum of the cross-entropies since `begin`. Waits for the GPU, as all of these do."""
        return loss_value(self.device.read(self.loss))

    def grad_norm(self) -> float:
        """The gradient's norm in the last update, before clipping."""
        return float(self.device.read(self.norm)[0])

    def steps_state(self) -> State:
        """Counts of non-finite steps."""
        return unpack_state(self.device.read(self.state))

    def tensors(self, which: str = "params") -> dict:
        """Adapter tensors by PEFT name: "params", "grads" (the sum over targets), "m" or "v"."""
        return self.adapter.layout.unflatten(self.device.read(getattr(self.adapter, which)))

    def load(self, which: str, tensors: dict):
        """Overwrite the adapter tensors that `tensors` returns under that name."""
        self.device.write(getattr(self.adapter, which), self.adapter.layout.flatten(tensors))
