"""A model with a KV cache on one device: prompts go in as flat rows, then one token of every sequence at a time.

extend(ids): all but each sequence's last token through the training forward, then `step` for the last ones
step:        logits[b] after the token in row b of `rows`
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..data.batching import bucket
from ..errors import UserError
from ..gpu import KernelCache, Plan, Workspace
from ..model.adapter_layout import GROUPS
from ..model.context import AdapterBuffers, Context, StepData, Watch
from ..model.decode import Scratch, decode_forward, decode_head, decodes
from ..model.kv_cache import KVCache
from ..model.layers import Model
from ..model.saved import Saved
from ..model.transformer import embed, infer_forward
from ..ops.linear import linear_forward
from ..ops.rmsnorm import rmsnorm_forward
from ..ops.rope import rope_table
from ..ops.rows import FIELDS, MAX_SEQUENCES, STRIDE, field, rows_buffer
from ..ops.step import step_buffer
from ..ops.window import state_buffer


class Decoder:
    """Decodes up to `sequences` sequences of up to `context` tokens, base and adapter unmerged.

    `adapter`: the buffers of an engine, or None for the bare model; they are read at every step, so that changes of
    an optimizer are seen. `matvec=False` takes the whole-sequence walk for single tokens too: slower, the check.
    `lengths[b]`: tokens of sequence b in the cache.
    """

    def __init__(
        self,
        device,
        model: Model,
        adapter: AdapterBuffers | None = None,
        *,
        context: int,
        sequences: int = 1,
        prefill_rows: int = 512,
        kernels: KernelCache | None = None,
        matvec: bool = True,
    ):
        if sequences > MAX_SEQUENCES:
            raise ValueError(f"{sequences} sequences at once; at most {MAX_SEQUENCES}")
        self.device, self.model, self.adapter = device, model, adapter
        self.context, self.matvec, self.kernels = context, matvec, kernels or KernelCache(device)
        self.cache = KVCache.create(device, model.config, sequences, context)
        self.work, self.watch = Workspace(device), Watch()
        table = rope_table(model.config.rope.inv_freq(model.config.head_dim), self.cache.span)
        self.rope = device.upload(table, label="rope table", kind="step")
        self.state, self.step_values = state_buffer(device), step_buffer(device)
        self.prefill_rows = bucket(max(prefill_rows, sequences))
        self.prefill_data = StepData.create(device, self.prefill_rows, 1)
        self.rows = rows_buffer(device)
        self.logits = device.tensor((sequences, model.head.rows), label="logits", kind="activations")
        self.lengths = [0] * sequences
        self._prefills, self._steps = {}, {}
        self._prefill_plan(self.prefill_rows)  # the largest first: later plans reuse its buffers

    # Recording

    def _context(self, plan, rows: int, batch: StepData) -> Context:
        return Context(
            plan, self.work, self.model, rows, batch, self.rope, self.state, self.step_values, self.watch, self.adapter
        )

    def _hidden(self, c: Context):
        """The last hidden state of the rows of `c`."""
        x = c.take(c.widths.hidden, "x")
        embed(c, x)
        saved = Saved.take(c, self.model.layers[0], self.cache.layers[0])
        return infer_forward(c, x, self.cache.layers, saved)

    def _rank(self, group: str) -> int:
        """The largest rank of a group in any layer, 0 without adapters."""
        groups = self.adapter.layout.groups if self.adapter else {}
        return max((g.rank for (_, name), g in groups.items() if name == group), default=0)

    def _prefill_plan(self, rows: int) -> Plan:
        if rows not in self._prefills:
            self.work.rewind()
            plan = Plan(self.device, self.kernels)
            with plan.section("run"):
                self._hidden(self._context(plan, rows, self.prefill_data.rows(rows)))
            self._prefills[rows] = plan
        return self._prefills[rows]

    def _step_plan(self, rows: int) -> Plan:
        """One token of each of the first `rows` sequences."""
        if rows not in self._steps:
            self.work.rewind()
            plan = Plan(self.device, self.kernels)
            fields = {name: field(self.rows, name, rows) for name in ("ids", "position", "slot", "kv_start")}
            c = self._context(plan, rows, replace(self.prefill_data.rows(rows), **fields))
            logits = self.logits.rows(0, rows)
            with plan.section("run"):
                if self.matvec and decodes(c.config, rows):
                    scratch = Scratch.take(c, max(map(self._rank, GROUPS)))
                    decode_forward(c, self.rows, self.cache.layers, scratch)
                    decode_head(c, logits, scratch)
                else:
                    self._whole_head(c, logits, self._hidden(c))
            self._steps[rows] = plan
        return self._steps[rows]

    def _whole_head(self, c: Context, logits, x):
        n, rstd = c.take(c.widths.hidden, "norm"), c.work.take((c.rows,), label="rstd")
        shape = {"rows": c.rows, "width": c.config.hidden_size}
        rmsnorm_forward(c.plan, n, rstd, x, self.model.norm, eps=c.config.rms_norm_eps, **shape)
        linear_forward(c.plan, logits, n, self.model.head, rows=c.rows)

    # Running

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget all sequences and begin with `prompts`; then as `extend`."""
        self.lengths = [0] * self.cache.sequences
        self.extend(prompts)

    def extend(self, ids: Sequence[Sequence[int]]) -> None:
        """Append tokens to the first len(ids) sequences, at least one to each; `logits` are then those of the last.

        UserError when a sequence would outgrow the context. ValueError for an empty list.
        """
        for b, tokens in enumerate(ids):
            if len(tokens) == 0:
                raise ValueError(f"sequence {b} gets no token")
            if self.lengths[b] + len(tokens) > self.context:
                raise UserError(
                    f"a sequence of {self.lengths[b] + len(tokens)} tokens exceeds the context of {self.context}: "
                    "shorten the prompt"
                )
        self._prefill([(b, t, self.lengths[b] + i) for b, tokens in enumerate(ids) for i, t in enumerate(tokens[:-1])])
        self.lengths[: len(ids)] = [n + len(tokens) for n, tokens in zip(self.lengths, ids, strict=False)]
        self._write_rows([tokens[-1] for tokens in ids])
        self._step_plan(len(ids)).run("run")

    def _prefill(self, tokens: list) -> None:
        for start in range(0, len(tokens), self.prefill_rows):
            chunk = tokens[start : start + self.prefill_rows]
            rows = bucket(len(chunk), self.prefill_rows)
            self._write(self.prefill_data, chunk, rows)
            self._prefill_plan(rows).run("run")

    def _write(self, data: StepData, tokens: list, rows: int) -> None:
        """Put (sequence, id, position) tokens into step data. Spare rows repeat the last: they write what it writes."""
        sequence, ids, position = np.array([*tokens, *[tokens[-1]] * (rows - len(tokens))], np.int32).T
        first = sequence * self.cache.span
        values = {"ids": ids, "position": position, "slot": first + position, "kv_start": first}
        for name, array in values.items():
            self.device.write(getattr(data, name).view(0, (rows,)), array)

    def _write_rows(self, ids: Sequence[int]) -> None:
        """The sequences' state with the last token of each, which the cache does not hold yet."""
        count = len(ids)
        position = np.array(self.lengths[:count]) - 1
        first = np.arange(count) * self.cache.span
        state = np.zeros((len(FIELDS), STRIDE), np.int32)
        values = {"ids": ids, "position": position, "slot": first + position, "kv_start": first}
        values |= {"end": first + self.context, "stream": np.arange(count)}
        for name, array in values.items():
            state[FIELDS.index(name), :count] = array
        self.device.write(self.rows, state)

    def read_logits(self, count: int) -> np.ndarray:
        """Logits of the first `count` sequences, float32 [count, V]. Waits for the GPU."""
        return self.device.read(self.logits.rows(0, count))[:, : self.model.config.vocab_size]
