"""A model and its adapter on one device: plans recorded once per token capacity, then replayed.

A step: begin; accumulate each micro-batch (write step data, forward, head chunks, backward); exchange; update.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from lorawgpu.backward.transformer import backward_section, transformer_backward
from lorawgpu.data.batching import MicroBatch
from lorawgpu.engine.exchange import Exchange, Item, Solo, share
from lorawgpu.engine.objective import CausalLM, Objective, Sections
from lorawgpu.engine.shards import PIECE_BYTES, Shards
from lorawgpu.gpu import KernelCache, Plan, Workspace
from lorawgpu.gpu.tensor import padded
from lorawgpu.gpu.workspace import WASTE
from lorawgpu.lora import flat
from lorawgpu.lora.layout import BELOW, AdapterLayout
from lorawgpu.model.context import AdapterBuffers, Context, NonFiniteIds, StepData
from lorawgpu.model.head import CHUNK_ALIGN, Head, capped_head_forward, section_name
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.model.transformer import EMBED, forward_section, infer_forward, transformer_forward
from lorawgpu.ops.cross_entropy import loss_value
from lorawgpu.ops.hash import random_key
from lorawgpu.ops.step import pack_step, step_buffer
from lorawgpu.ops.step_state import StepState, begin_step, end_step, state_buffer, unpack_state
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.device_model import Model

IGNORED = -1  # target id of an unused target row
CLEAR_DX = "clear dx"  # the section between the layers' forward and the head
GRAD_NORM = "gradient norm"  # its name among the values that may not be finite


@dataclass(frozen=True)
class Options:
    """How the engine records. Only dropout changes the mathematics."""

    capacity: int  # rows of the largest micro-batch
    positions: int  # tokens in the longest sequence
    dropout: float = 0.0
    seed: int = 0
    checkpointing: bool = False
    attention: str = "flash"
    flops_per_submit: float = float("inf")
    shares: tuple[int, ...] = ()  # micro-batches of each rank in a full step; () for equal ones
    piece_bytes: int = PIECE_BYTES  # of the adapter, exchanged at once between ranks


@dataclass(frozen=True)
class Recorded:
    """A recorded plan for `rows` rows, its head, and the sections to replay for a number of target rows."""

    plan: Plan
    rows: int
    head: Head
    sections: Sections

    def flops(self, targets: int) -> float:
        """Operations of a replay with `targets` target rows, counting only matrix products and attention."""
        return sum(record.flops for name in self.sections(targets) for record in self.plan.sections[name])


class Engine:
    """Computes losses, gradients and optimizer steps. Without a `layout` it runs the bare base model.

    objective: called as objective(device, most target rows of a micro-batch). exchange: the connection to other
    processes that train the same adapter; default `Solo`.
    """

    def __init__(
        self,
        device,
        model: Model,
        options: Options,
        layout: AdapterLayout | None = None,
        tensors: dict | None = None,
        optimizer: AdamW | None = None,
        kernels: KernelCache | None = None,
        objective: Callable[..., Objective] = CausalLM,
        exchange: Exchange | None = None,
    ):
        self.device, self.model, self.options, self.optimizer = device, model, options, optimizer
        self.kernels, self.exchange = kernels or KernelCache(device), exchange or Solo()
        self.work, self.non_finite = Workspace(device), NonFiniteIds()
        self.batch = StepData.create(device, model, options.capacity, padded(options.capacity, CHUNK_ALIGN))
        self.ropes = RopeTables(device, model.config, options.positions)
        self.state, self.step_values = state_buffer(device), step_buffer(device)
        self.objective = objective(device, self.batch.target_ids.size)
        self.totals = {name: device.tensor((2,), "u32", name, "step") for name in self.objective.sums}
        self.norm = device.tensor((1,), label="grad norm", kind="step")
        trained = layout and optimizer and self.exchange.size > 1
        self.shards = Shards(device, layout, self.exchange, options.piece_bytes) if trained else None
        layers = self.shards.layers if self.shards else []
        self._arrivals = {arrival_section(layer, len(model.layers)): layer for layer in layers}
        self._departures = {backward_section(layer): layer for layer in layers}
        self.adapter = self._adapter(layout, tensors) if layout else None
        self._plans = {}
        if optimizer:
            self.plan("train", options.capacity)
        self._step = self._record_step()  # last, so that a bad tensor is reported rather than the bad norm it causes

    def _adapter(self, layout, tensors) -> AdapterBuffers:
        def buffers(name, ranges=layout.buffers):
            return flat.take(self.device, ranges, f"adapter {name}", "optimizer")

        own = self.shards.buffers if self.shards else layout.buffers
        training = {"grads": buffers("grads"), **{n: buffers(n, own) for n in "mv"}} if self.optimizer else {}
        return AdapterBuffers.create(self.device, layout, tensors, **training)

    # Recording

    def _context(self, plan, rows, training, adapter) -> Context:
        return Context(
            plan,
            self.work,
            self.model,
            rows,
            self.batch.rows(rows),
            self.ropes,
            self.state,
            self.step_values,
            self.non_finite,
            self.adapter if adapter else None,
            self.options.dropout if training else 0.0,
            self.options.attention,
        )

    def plan(self, kind: str, rows: int, adapter: bool = True) -> Recorded:
        """The plan of `kind` for `rows` rows, with or without the adapter's terms. Recorded on first use.

        kind: "train", "eval", "base" (the first pass of an objective with `base_first`) or "logits". An engine records
        a plan of its full capacity first, so that smaller plans reuse those buffers. ValueError if `rows` exceeds the
        capacity.
        """
        if rows > self.options.capacity:
            raise ValueError(f"{rows} rows exceed the capacity of {self.options.capacity}")
        key = kind, rows, adapter and self.adapter is not None
        if key not in self._plans:
            if not self._plans and rows < self.options.capacity:
                self.plan(kind, self.options.capacity, adapter)
            with self.exchange.working():
                self._plans[key] = self._record(kind, rows, adapter)
        return self._plans[key]

    def _record(self, kind: str, rows: int, adapter: bool) -> Recorded:
        self.work.rewind()
        plan = Plan(self.device, self.kernels, self.options.flops_per_submit)
        c = self._context(plan, rows, kind == "train", adapter)
        record = {"train": self._record_train, "logits": self._record_logits}.get(kind, self._record_forward)
        return Recorded(plan, rows, *record(c, None if kind == "base" else self.totals))

    def _record_train(self, c, totals) -> tuple[Head, Sections]:
        with c.plan.section(EMBED):
            x, saved = transformer_forward(c, self.options.checkpointing)
        with c.plan.section(CLEAR_DX):  # after the layers, which may have used its buffer
            dx = c.keep(c.hidden, "dx")
            c.plan.clear(dx)
        head = Head.take(c, self.device.max_binding)
        gated = c.rows * max(padded(layer.spec.mlp.width) for layer in self.model.layers)
        c.room = gated  # the buffer of the forward's gated product is free
        sections = self.objective.record(c, head, x, dx, totals)
        head.give(c)
        c.room = head.logits.size if head.logits.size > 2 * WASTE * gated else 0  # too large for other uses
        backward = transformer_backward(c, dx, saved, self.options.checkpointing)
        forward = [EMBED, *(forward_section(layer.index) for layer in c.model.layers), CLEAR_DX]
        return head, lambda targets: [*forward, *sections(targets), *backward]

    def _record_forward(self, c, totals) -> tuple[Head, Sections]:
        with c.plan.section("forward"):
            x = infer_forward(c)
        head = Head.take(c, self.device.max_binding)
        sections = self.objective.record(c, head, x, None, totals)
        return head, lambda targets: ["forward", *sections(targets)]

    def _record_logits(self, c, totals) -> tuple[Head, Sections]:
        with c.plan.section("forward"):
            x = infer_forward(c)
        head = Head.take(c, self.device.max_binding)
        head.record(c, partial(capped_head_forward, c, head, x))
        return head, lambda targets: ["forward", *head.sections(targets)]

    def _record_step(self) -> Plan:
        plan = Plan(self.device, self.kernels)
        loss, *others = self.totals.values()
        with plan.section("begin"):
            begin_step(plan, self.state, loss)
            for total in others:
                plan.clear(total)
            if self.optimizer:
                for _, grads in flat.parts(self.adapter.grads):
                    plan.clear(grads)
        with plan.section("update"):
            if self.optimizer:
                self._record_update(plan)
            end_step(plan, self.state)
        return plan

    def _record_update(self, plan: Plan):
        adapter, shards = self.adapter, self.shards
        record_id = self.non_finite.id(GRAD_NORM)
        if not shards:
            self.optimizer.record(plan, adapter, self.state, self.step_values, self.norm, record_id=record_id)
            return
        params, grads = map(shards.own_views, (adapter.params, adapter.grads))
        m, v = map(shards.views, (adapter.m, adapter.v))
        self.optimizer.record_pieces(plan, params, m, v, grads, self.state, self.step_values, self.norm)

    def pace(self, flops: float):
        """Split the submits of all plans, present and future, into about `flops` operations each."""
        self.options = replace(self.options, flops_per_submit=flops)
        for plan in self.plans():
            plan.flops_per_submit = flops

    def plans(self) -> list[Plan]:
        """All plans recorded so far."""
        return [self._step, *(recorded.plan for recorded in self._plans.values())]

    def flops(self, batch: MicroBatch, kind: str = "train", adapter: bool = True) -> float:
        """Operations of `accumulate` (kind "train") or `evaluate` ("eval") for this micro-batch; 0 without targets."""
        if not batch.targets:
            return 0.0
        return sum(recorded.flops(batch.targets) for recorded in self._passes(kind, batch.capacity, adapter))

    def _passes(self, kind: str, rows: int, adapter: bool = True) -> list[Recorded]:
        """The plans to replay for a micro-batch, in order."""
        before = [self.plan("base", rows, adapter=False)] if self.objective.base_first else []
        return [*before, self.plan(kind, rows, adapter)]

    # Replaying

    def write(self, batch: MicroBatch):
        """Write the arrays of a micro-batch to the step data."""
        position = self.ropes.rows_of(batch.position, batch.segment_end - batch.kv_start)
        values = {"ids": batch.ids, "position": position.astype(np.int32), "slot": batch.slot}
        values |= {"kv_start": batch.kv_start, "segment_end": batch.segment_end}
        for name, array in values.items():
            self.device.write(getattr(self.batch, name).view(0, (batch.capacity,)), array)
        if self.optimizer and self.adapter.layout.trains_embedding:
            order = np.full(batch.capacity, -1, np.int32)
            order[: batch.tokens] = np.argsort(batch.ids[: batch.tokens], kind="stable")
            self.device.write(self.batch.order.view(0, (batch.capacity,)), order)
        self.batch.write_per_layer(self.device, self.model, batch.ids)
        rows = np.zeros(self.batch.target_rows.size, np.int32)
        ids = np.full(self.batch.target_ids.size, IGNORED, np.int32)
        rows[: batch.targets], ids[: batch.targets] = batch.target_rows, batch.target_ids
        self.device.write(self.batch.target_rows, rows)
        self.device.write(self.batch.target_ids, ids)

    def begin(self):
        """Start an optimizer step or an evaluation: clear gradients, totals and the bad flag."""
        self._step.run("begin")

    def accumulate(self, batch: MicroBatch, step: int = 1, index: int = 0, last: bool = False):
        """Add the gradient of one micro-batch: number `index` (from 0) of optimizer step `step` (from 1).

        last: whether it is the last one of this process, so that gradients leave for the others as soon as they are
        complete.
        """
        if batch.targets:
            if self.options.dropout:
                self.device.write(self.step_values, pack_step(key=random_key(self.options.seed, step, index)))
            self._replay("train", batch, leave=last and self.shards is not None)

    def update(self, step: int, lr: float, divisor: int):
        """Divide the accumulated gradient by `divisor`, clip it and apply AdamW. `step` counts from 1."""
        self.device.write(self.step_values, self.optimizer.step_values(step, lr, divisor))
        self._step.run("update")

    def step(self, batches: Sequence[MicroBatch], number: int, lr: float) -> int:
        """Take optimizer step `number` (from 1) over `batches`, of which each process computes its share.

        Returns the divisor of the step, its number of target tokens. If it is 0, the step is skipped.
        """
        divisor = sum(map(self.objective.divisor, batches))
        if not divisor:
            return 0
        self.begin()
        own = [(index, batch) for index, batch in self.share(batches) if batch.targets]
        for index, batch in own:
            self.accumulate(batch, number, index, last=index == own[-1][0])
        if self.shards:
            self._update_shards(number, lr, divisor)
        else:
            self.update(number, lr, divisor)
        return divisor

    def share(self, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
        """The micro-batches that this process computes of a step or an evaluation, each with its index among all."""
        return share(self.exchange.rank, self.options.shares or (1,) * self.exchange.size, items)

    def exchange_once(self):
        """All that the processes exchange in a step, without a step: the adapter stays as it is."""
        self.settle()
        self.shards.sum_step(self.adapter.grads, self.state, tuple(self.totals.values()))
        self.shards.spread(self.adapter.params)
        self.settle()

    def _update_shards(self, number: int, lr: float, divisor: int):
        """Sum the gradients of all processes, update the own shard and exchange the new parameters."""
        self.settle()  # this process may have had no micro-batch
        sums = self.shards.sum_step(self.adapter.grads, self.state, tuple(self.totals.values()))
        with np.errstate(over="ignore", invalid="ignore"):
            norm = np.sqrt(np.float64(sums.squares)).astype(np.float32) / np.float32(divisor)
        bad, record = sums.bad, sums.record
        if not np.isfinite(norm):
            bad, record = True, min(record, self.non_finite.id(GRAD_NORM))
        self.device.write(self.norm, np.array([norm], np.float32))
        self.device.write_at(self.state, 0, np.array([bad, record], np.uint32))
        self.update(number, lr, divisor)
        if not bad:
            self.shards.spread(self.adapter.params)

    def evaluate(
        self, batch: MicroBatch, adapter: bool = True, submitted: Callable[[float], None] | None = None
    ) -> None:
        """Add one micro-batch to the totals, without dropout or gradients. Call `begin` before the first.

        Without `adapter`, the bare base model is evaluated. submitted: as for `Plan.run`.
        """
        if batch.targets:
            self._replay("eval", batch, adapter, submitted)

    def _replay(self, kind: str, batch: MicroBatch, adapter: bool = True, submitted=None, leave: bool = False):
        if kind != "train":
            self.settle()
        self.write(batch)
        self.objective.write(batch)
        for recorded in self._passes(kind, batch.capacity, adapter):
            if self.shards and kind == "train":
                self.shards.pace(self.state)
                self._replay_shards(recorded, batch.targets, leave)
            else:
                recorded.plan.run(*recorded.sections(batch.targets), submitted=submitted)

    def _replay_shards(self, recorded: Recorded, targets: int, leave: bool):
        """Replay a training plan. Before a layer's forward its parameters must have come from the other processes;
        after its backward, with `leave`, its gradients leave for them."""
        shards, adapter, waiting = self.shards, self.adapter, []
        for name in recorded.sections(targets):
            if (layer := self._arrivals.get(name)) is not None and shards.coming(layer):
                recorded.plan.run(*waiting)
                shards.arrive(adapter.params, layer)
                waiting = []
            waiting.append(name)
            if leave and (layer := self._departures.get(name)) is not None:
                recorded.plan.run(*waiting)
                shards.leave(adapter.grads, layer)
                waiting = []
        recorded.plan.run(*waiting)

    def settle(self):
        """Wait until the parameters of all processes are here. Called before anything but a step reads them."""
        if self.shards:
            self.shards.arrive(self.adapter.params)

    def logits(self, batch: MicroBatch, rows: np.ndarray, adapter: bool = True) -> np.ndarray:
        """Logits of `rows` of a micro-batch, float32 [len(rows), V]; without `adapter`, those of the base model."""
        self.settle()
        self.write(replace(batch, target_rows=rows.astype(np.int32), target_ids=np.zeros(len(rows), np.int32)))
        recorded = self.plan("logits", batch.capacity, adapter)
        recorded.plan.run("forward")
        parts = []
        for start, count in recorded.head.spans(len(rows)):
            recorded.plan.run(section_name("head", start, count))
            parts.append(self.device.read(recorded.head.logits.rows(0, count)))
        return np.concatenate(parts)[: len(rows), : self.model.config.vocab_size]

    # Reading back

    def loss_sum(self) -> float:
        """Sum of the losses since `begin`. Waits for the GPU, as all methods below do."""
        return loss_value(self.device.read(self.totals["loss"]))

    def grad_norm(self) -> float:
        """The gradient norm in the last update, before clipping."""
        return float(self.device.read(self.norm)[0])

    def steps_state(self) -> StepState:
        """Counts of non-finite steps."""
        return unpack_state(self.device.read(self.state))

    def tensors(self, which: str = "params") -> dict:
        """Adapter tensors by PEFT name: "params", "grads" (the sum over targets), "m" or "v".

        Several processes must ask together for anything but "params", because each holds only its shard.
        """
        self.settle()
        values = flat.read(self.device, getattr(self.adapter, which))
        if self.shards and which != "params":
            values = self.shards.gather(self.shards.cut(values) if which == "grads" else values)
        return self.adapter.layout.unflatten(values)

    def load(self, which: str, tensors: dict):
        """Overwrite adapter tensors, "params", "m" or "v"; the keys are as in `tensors`."""
        self.settle()
        values = self.adapter.layout.flatten(tensors)
        if self.shards and which != "params":
            values = self.shards.cut(values)
        flat.write(self.device, getattr(self.adapter, which), values)


def arrival_section(layer: int, layers: int) -> str:
    """The section of a training plan that first reads an adapter's parameters of `layer`, of `layers`."""
    if layer == BELOW:
        return EMBED
    return CLEAR_DX if layer == layers else forward_section(layer)
