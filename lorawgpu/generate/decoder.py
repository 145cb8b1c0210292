"""Decoding with a KV cache: prompts go in as flat rows, then each step processes one token of every sequence.

start, extend   process tokens: all but the last of each sequence in a prefill pass, the last ones in a decode step
encode, submit  choose tokens on the GPU and process them in decode steps; the host reads the tokens later
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lorawgpu.data.batching import bucket
from lorawgpu.errors import UserError
from lorawgpu.families.spec import GROUPS
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import KernelCache, Plan, Workspace
from lorawgpu.gpu.submit_budget import first_rate, flops_per_submit
from lorawgpu.model.context import AdapterBuffers, Context, NonFiniteIds, StepData
from lorawgpu.model.decode import Scratch, decode_forward, decode_head, decodes
from lorawgpu.model.head import cap_logits, logits_forward
from lorawgpu.model.kv_cache import KVCache
from lorawgpu.model.rope_tables import RopeTables
from lorawgpu.model.transformer import infer_forward
from lorawgpu.ops.decode_state import FIELDS, MAX_SEQUENCES, STRIDE, field, rows_buffer
from lorawgpu.ops.sample import RING, SampleBuffers, pack_settings, record_sample, sections_of, seen_bits
from lorawgpu.ops.step import step_buffer
from lorawgpu.ops.step_state import StepState, pack_state, state_buffer
from lorawgpu.weights.device_model import Model

PREFILL_MS = 500.0  # of one submit: some systems kill GPU work after two seconds
CLEAN = pack_state(StepState(False, 0, 0, None, 0))


class Decoder:
    """Decodes up to `sequences` sequences of up to `context` tokens, with base and adapter unmerged.

    `adapter`: the buffers of an engine, or None for the base model; they are read in every step, so updates of an
    optimizer take effect. `matvec=False` uses the prefill pass for single tokens too: slower, for tests.
    `held[b]`: the tokens of sequence b in the cache.
    """

    def __init__(
        self,
        device,
        model: Model,
        adapter: AdapterBuffers | None = None,
        *,
        context: int,
        sequences: int = 1,
        prefill_rows: int = 1024,
        kernels: KernelCache | None = None,
        matvec: bool = True,
    ):
        if sequences > MAX_SEQUENCES:
            raise ValueError(f"{sequences} sequences at once; wanted at most {MAX_SEQUENCES}")
        self.device, self.model, self.adapter = device, model, adapter
        self.context, self.matvec, self.kernels = context, matvec, kernels or KernelCache(device)
        self.cache = KVCache.create(device, model.config, sequences, context)
        self.work, self.non_finite = Workspace(device), NonFiniteIds()
        self.ropes = RopeTables(device, model.config, self.cache.span)
        self.state, self.step_values = state_buffer(device), step_buffer(device)
        self.prefill_rows = bucket(max(min(prefill_rows, context), sequences))
        self.prefill_data = StepData.create(device, model, self.prefill_rows, 1)
        self.rows = rows_buffer(device)
        self.logits = device.tensor((sequences, model.head.rows), label="logits", kind="activations")
        self.buffers = SampleBuffers.create(device, sequences, model.config.vocab_size)
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self._long = [False] * sequences  # whether the cache of a sequence was made with longrope's long frequencies
        self._prefills, self._steps = {}, {}

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

    def _prefill_plan(self, rows: int) -> Plan:
        if rows not in self._prefills:
            if not self._prefills and rows < self.prefill_rows:
                self._prefill_plan(self.prefill_rows)  # the largest first: later plans reuse its buffers
            self.work.rewind()
            plan = Plan(self.device, self.kernels, flops_per_submit(first_rate(self.device), PREFILL_MS))
            with plan.section("forward"):
                self._hidden(self._context(plan, rows, self.prefill_data.rows(rows)))
            self._prefills[rows] = plan
        return self._prefills[rows]

    def step_plan(self, rows: int) -> Plan:
        """The plan of the first `rows` sequences: `forward` from ids to logits, ops.sample.sections_of to new ids."""
        if rows not in self._steps:
            self.work.rewind()
            plan = Plan(self.device, self.kernels)
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
                    logits_forward(c, logits, c.take(c.hidden, "norm"), rstd, x, rows)
                cap_logits(c, logits, rows)
            record_sample(plan, self.buffers, logits, self.rows, self.state, count=rows)
            self._steps[rows] = plan
        return self._steps[rows]

    def _rank(self, group: str) -> int:
        """The largest adapter rank of a group in any layer, or 0."""
        groups = self.adapter.layout.groups if self.adapter else {}
        return max((g.rank for (_, name), g in groups.items() if name == group), default=0)

    # Running

    def prepare(self) -> None:
        """Record the plans of a single sequence, so that nothing is allocated later."""
        self._prefill_plan(self.prefill_rows)
        self.step_plan(1)

    def start(self, prompts: Sequence[Sequence[int]], streams: Sequence[int] | None = None, reuse: bool = False):
        """Restart the first len(prompts) sequences, then `extend` them. `streams`: their random number streams.

        `reuse` keeps the part of the cache that matches the beginning of a prompt. Its sums may have been added in
        another order; without it, an answer does not depend on earlier ones.
        """
        self.device.write(self.state, CLEAN)
        self.streams = list(streams or range(len(prompts)))
        self.held = [[] for _ in self.held] if not reuse else self.held
        for b, prompt in enumerate(prompts):
            same = next((i for i, (x, y) in enumerate(zip(self.held[b], prompt, strict=False)) if x != y), None)
            keep = min(len(self.held[b]), len(prompt)) if same is None else same
            self.held[b] = self.held[b][: min(keep, len(prompt) - 1)]  # not the last token: its step gives the logits
        self.extend([prompt[len(held) :] for prompt, held in zip(prompts, self.held, strict=False)])

    def extend(self, ids: Sequence[Sequence[int]]) -> None:
        """Append tokens to the first len(ids) sequences, at least one to each, and compute `logits` of the last ones.

        Raises UserError if a sequence would exceed the context, and ValueError for an empty list.
        """
        for held, tokens in zip(self.held, ids, strict=False):
            if len(tokens) == 0:
                raise ValueError("each sequence must be extended by at least one token")
            if len(held) + len(tokens) > self.context:
                raise UserError(
                    f"{len(held) + len(tokens)} tokens exceed the context of {self.context}: shorten the prompt"
                )
        for held, tokens in zip(self.held, ids, strict=False):
            held.extend(map(int, tokens))
        self._process([len(held) - len(tokens) for held, tokens in zip(self.held, ids, strict=False)])

    def advance(self, count: int) -> None:
        """Compute `logits` of the last token of the first `count` sequences, each of which may have one new token."""
        self._process([len(held) - 1 for held in self.held[:count]])

    def _process(self, done: list[int]) -> None:
        """Process each sequence from token number done[b] on: all but its last token at once, then the last ones."""
        count, longest = len(done), self.model.config.longest_short
        if longest is not None:
            for b, held in enumerate(self.held[:count]):
                if self._long[b] != (len(held) > longest):  # the frequencies change for all of its tokens
                    self._long[b], done[b] = len(held) > longest, 0
        flat = [(b, self.held[b][i], i) for b in range(count) for i in range(done[b], len(self.held[b]) - 1)]
        for begin in range(0, len(flat), self.prefill_rows):
            chunk = flat[begin : begin + self.prefill_rows]
            rows = bucket(len(chunk), self.prefill_rows)
            self._write(chunk, rows)
            self._prefill_plan(rows).run("forward")
        self._write_rows(count)
        self.step_plan(count).run("forward")

    def _write(self, tokens: list, rows: int) -> None:
        """Write (sequence, id, position) of each row. Spare rows repeat the last one, so they write the same values."""
        sequence, ids, position = np.array([*tokens, *[tokens[-1]] * (rows - len(tokens))], np.int32).T
        first = sequence * self.cache.span
        values = {"ids": ids, "position": self._rope_rows(sequence, position), "slot": first + position}
        values |= {"kv_start": first}
        for name, array in values.items():
            self.device.write(getattr(self.prefill_data, name).view(0, (rows,)), np.asarray(array, np.int32))
        self.prefill_data.write_per_layer(self.device, self.model, ids)

    def _rope_rows(self, sequence, position) -> np.ndarray:
        lengths = np.array([len(held) for held in self.held])
        return self.ropes.rows_of(position, lengths[sequence])

    def _write_rows(self, count: int) -> None:
        """Write the state of the first `count` sequences: the last token of each is the next input."""
        sequence, position = np.arange(count), np.array([len(held) - 1 for held in self.held[:count]])
        first, ids = sequence * self.cache.span, [held[-1] for held in self.held[:count]]
        values = {"ids": ids, "position": self._rope_rows(sequence, position), "slot": first + position}
        values |= {"kv_start": first, "end": first + self.context, "stream": self.streams[:count]}
        state = np.zeros((len(FIELDS), STRIDE), np.int32)
        for name, array in values.items():
            state[FIELDS.index(name), :count] = array
        self.device.write(self.rows, state)
        self.prefill_data.write_per_layer(self.device, self.model, np.array(ids))

    def read_logits(self, count: int) -> np.ndarray:
        """The logits of the first `count` sequences, float32 [count, V]. Waits for the GPU."""
        return self.device.read(self.logits.rows(0, count))[:, : self.model.config.vocab_size]

    # Sampling

    def sample(self, sampling: Sampling, count: int) -> None:
        """Prepare to choose tokens for the first `count` sequences."""
        self.device.write(self.buffers.settings, pack_settings(sampling))
        for b in range(count):
            bits = seen_bits(self.held[b], self.buffers.vocab)
            self.device.write_at(self.buffers.seen, b * bits.size, bits)

    def records(self, count: int, sampling: Sampling) -> list:
        """The dispatches that choose a token for each of `count` sequences and, unless `stepwise`, process it."""
        sections, forward = self.step_plan(count).sections, () if self.stepwise else ("forward",)
        return [record for name in (*sections_of(sampling), *forward) for record in sections[name]]

    def encode(self, count: int, tokens: int, sampling: Sampling):
        """Commands that choose and process `tokens` tokens, at most RING, for each of `count` sequences."""
        if not 0 < tokens <= RING:
            raise ValueError(f"{tokens} tokens at once; wanted 1 to {RING}")
        return self.step_plan(count).encode(self.records(count, sampling) * tokens)

    def submit(self, commands) -> None:
        """Submit the commands that `encode` returned, without waiting."""
        self.device.submit(commands)

    def chosen(self, count: int, first: int, tokens: int) -> np.ndarray:
        """The chosen tokens from number `first` on, u32 [count, tokens]; 0xffffffff for a non-finite value. Waits."""
        return self.device.read(self.buffers.history)[:count, np.arange(first, first + tokens) % RING]

    def recover(self) -> str:
        """After a value that was not finite: returns where the first one was, and clears the cache, because attention
        multiplies even invisible slots by 0."""
        bad, record = map(int, self.device.read(self.state)[:2])
        plan = Plan(self.device, self.kernels)
        with plan.section("clear"):
            for tensor in (t for layer in self.cache.layers for t in layer):
                plan.clear(tensor)
        plan.run("clear")
        self.held = [[] for _ in self.held]
        return self.non_finite.names[record] if bad else "the logits"
