"""The plans of decoding with one adapter: prefill passes over flat rows, and steps of one token of each sequence.

`Shared` is what the plans of several adapters over one model have in common: among it the KV cache. Who owns which of
its slots is decided by the classes that run the plans: `Decoder`, and `BatchDecoder` for sequences that come and go.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lorawgpu.data.batching import bucket
from lorawgpu.families.spec import GROUPS
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Device, KernelCache, Plan, Tensor, Workspace
from lorawgpu.gpu.submit_budget import first_rate, flops_per_submit
from lorawgpu.model.context import AdapterBuffers, Context, NonFiniteIds, StepData
from lorawgpu.model.decode import Scratch, decode_forward, decode_head, decodes
from lorawgpu.model.head import HeadAdapter, cap_logits, logits_forward
from lorawgpu.model.kv_cache import KVCache
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.model.transformer import infer_forward
from lorawgpu.ops.decode_state import FIELDS, STRIDE, field, rows_buffer
from lorawgpu.ops.sample import RING, SampleBuffers, record_sample, sections_of
from lorawgpu.ops.step import step_buffer
from lorawgpu.ops.step_state import StepState, pack_state, state_buffer
from lorawgpu.weights.device_model import Model

PREFILL_MS = 500.0  # of one submit: some systems kill GPU work after two seconds
CLEAN = pack_state(StepState(False, 0, 0, None, 0))


@dataclass(frozen=True)
class Shared:
    """`prefill_rows`: the largest prefill pass; `work`: buffers of passes and steps, which run one after another."""

    device: Device
    model: Model
    kernels: KernelCache
    cache: KVCache
    ropes: RopeTables
    work: Workspace
    prefill_rows: int
    prefill_data: StepData

    @staticmethod
    def create(device, model: Model, cache: KVCache, positions: int, prefill_rows: int, kernels=None) -> "Shared":
        """`positions`: the most tokens of a sequence."""
        ropes, rows = RopeTables(device, model.config, positions), bucket(prefill_rows)
        data = StepData.create(device, model, rows, 1)
        return Shared(device, model, kernels or KernelCache(device), cache, ropes, Workspace(device), rows, data)


class DecodePlans:
    """`adapter`: None for the base model. `rows`: the most sequences of a step."""

    def __init__(self, shared: Shared, adapter: AdapterBuffers | None, rows: int, matvec: bool = True):
        self.shared, self.adapter, self.matvec = shared, adapter, matvec
        self.device, self.model, self.cache, self.ropes = shared.device, shared.model, shared.cache, shared.ropes
        self.prefill_rows, self.prefill_data = shared.prefill_rows, shared.prefill_data
        self.work, self.non_finite = shared.work, NonFiniteIds()
        self.state, self.step_values = state_buffer(self.device), step_buffer(self.device)
        self.rows = rows_buffer(self.device)
        self.logits = self.device.tensor((rows, self.model.head.rows), label="logits", kind="activations")
        self.buffers = SampleBuffers.create(self.device, rows, self.model.config.vocab_size)
        self._prefills: dict[int, tuple[Plan, Tensor]] = {}
        self._steps: dict[int, Plan] = {}

    @property
    def stepwise(self) -> bool:
        """Whether the host must know a token before it is processed: to gather its per-layer input, or for longrope."""
        config = self.model.config
        return bool(config.per_layer_input) or config.longest_short is not None

    # Recording

    def _context(self, plan, rows: int, batch: StepData) -> Context:
        shared = (self.ropes, self.state, self.step_values, self.non_finite, self.adapter)
        return Context(plan, self.work, self.model, rows, batch, *shared)

    def _hidden(self, c: Context):
        """The last hidden state of each row of `c`."""
        return infer_forward(c, self.cache.layers)

    def prefill_plan(self, rows: int) -> tuple[Plan, Tensor]:
        """The plan of a prefill pass, `forward`, and where it leaves the last hidden states [rows, C]."""
        if rows not in self._prefills:
            if not self._prefills and rows < self.prefill_rows:
                self.prefill_plan(self.prefill_rows)  # the largest first: later plans reuse its buffers
            self.work.rewind()
            plan = Plan(self.device, self.shared.kernels, flops_per_submit(first_rate(self.device), PREFILL_MS))
            with plan.section("forward"):
                x = self._hidden(self._context(plan, rows, self.prefill_data.rows(rows)))
            self._prefills[rows] = plan, x
        return self._prefills[rows]

    def step_plan(self, rows: int) -> Plan:
        """The plan of the first `rows` sequences: `forward` from ids to logits, ops.sample.sections_of to new ids."""
        if rows not in self._steps:
            self.work.rewind()
            plan = Plan(self.device, self.shared.kernels)
            fields = {name: field(self.rows, name, rows) for name in ("ids", "position", "slot", "kv_start")}
            c = self._context(plan, rows, replace(self.prefill_data.rows(rows), **fields))
            logits = self.logits.rows(0, rows)
            with plan.section("forward"):
                if self.matvec and decodes(c.model, rows):
                    scratch = Scratch.take(c, max(map(self._rank, GROUPS)))
                    x = decode_forward(c, self.rows, self.cache.layers, scratch)
                    decode_head(c, logits, x, scratch)
                else:
                    x, rstd = self._hidden(c), c.work.take((rows,), label="rstd")
                    logits_forward(c, logits, c.take(c.hidden, "norm"), rstd, x, rows, HeadAdapter.take(c, rows))
                cap_logits(c, logits, rows)
            record_sample(plan, self.buffers, logits, self.rows, self.state, count=rows)
            self._steps[rows] = plan
        return self._steps[rows]

    def prepare(self) -> None:
        """Record the plans of a single sequence, so that nothing is allocated later."""
        self.prefill_plan(self.prefill_rows)
        self.step_plan(1)

    def _rank(self, group: str) -> int:
        """The largest adapter rank of a group in any layer, or 0."""
        groups = self.adapter.layout.groups if self.adapter else {}
        return max((g.rank for (_, name), g in groups.items() if name == group), default=0)

    # Running

    def write_prefill(self, tokens: np.ndarray) -> int:
        """Write the columns of `tokens` [n, 4]: ids, row of the RoPE tables, slot, first slot of its sequence. Returns
        the rows of the pass. Spare rows repeat the last one, so they write the same values."""
        rows = bucket(len(tokens), self.prefill_rows)
        columns = tokens[[*range(len(tokens)), *[-1] * (rows - len(tokens))]].astype(np.int32).T
        for name, values in zip(("ids", "position", "slot", "kv_start"), columns, strict=True):
            self.device.write(getattr(self.prefill_data, name).view(0, (rows,)), values)
        self.prefill_data.write_per_layer(self.device, self.model, columns[0])
        return rows

    def write_rows(self, **values: Sequence[int]) -> None:
        """Write fields of the step's rows (ops.decode_state); those that are not given become 0."""
        state = np.zeros((len(FIELDS), STRIDE), np.int32)
        for name, array in values.items():
            state[FIELDS.index(name), : len(array)] = array
        self.device.write(self.rows, state)
        self.prefill_data.write_per_layer(self.device, self.model, np.array(values["ids"]))

    def step_records(self, rows: int, samplings: Sequence[Sampling]) -> tuple[list, list]:
        """The dispatches that process a token of each row, and those that choose the next one."""
        sections = self.step_plan(rows).sections
        chosen = [record for name in sections_of(samplings) for record in sections[name]]
        return sections["forward"], chosen

    def submit(self, commands) -> None:
        """Submit commands without waiting."""
        self.device.submit(commands)

    def chosen(self, count: int, first: int, tokens: int) -> np.ndarray:
        """The chosen tokens from number `first` on, u32 [count, tokens]; 0xffffffff for a non-finite value. Waits."""
        return self.device.read(self.buffers.history)[:count, np.arange(first, first + tokens) % RING]

    def first_bad(self) -> str:
        """Where the first value was that is not finite."""
        bad, record = map(int, self.device.read(self.state)[:2])
        return self.non_finite.names[record] if bad else "the logits"
