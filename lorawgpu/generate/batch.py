"""Decoding of sequences that come and go: each turn processes one token, or a few, of whatever sequences there are.

Between two turns the GPU keeps nothing but the KV cache, so any rows may make up a batch. The bits of a row depend
neither on its neighbors nor on its slots: an answer is the same, whoever else is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.generate.plans import CLEAN, DecodePlans, Shared
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Plan, Workspace
from lorawgpu.gpu.tensor import padded
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.model.head import HeadAdapter, cap_logits, logits_forward
from lorawgpu.model.kv_cache import SPAN_ALIGN, KVCache
from lorawgpu.ops.decode_state import MAX_SEQUENCES
from lorawgpu.ops.matvec import MAX_ROWS
from lorawgpu.ops.sample import pack_settings, seen_bits

SCORED = MAX_SEQUENCES  # rows whose logits are read at once


@dataclass(eq=False)
class Row:
    """A sequence: its tokens, of which `done` are in the cache, in `slots`. The last token is never there: the step
    that processes it chooses the next one."""

    ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    stream: int = 0
    slots: range = range(0)
    done: int = 0
    long: bool = False  # its cache was made with longrope's long frequencies

    @property
    def waits(self) -> int:
        """Tokens that a prefill pass has to process first."""
        return len(self.ids) - 1 - self.done


def most_tokens(device, config: ModelConfig) -> int:
    """The tokens of the largest cache: one binding for a layer's keys."""
    width = max(padded(layer.attention.kv_width) for layer in config.layers)
    return device.max_binding // (4 * width) // SPAN_ALIGN * SPAN_ALIGN


def cache_for(device, config: ModelConfig, tokens: int) -> KVCache:
    """A cache of `tokens` slots for all sequences together. UserError if a layer's exceeds one binding."""
    if tokens > (most := most_tokens(device, config)):
        raise UserError(f"a KV cache of {tokens:,} tokens exceeds what {device.name} binds: wanted at most {most:,}")
    return KVCache.create(device, config, 1, tokens)


def step_rows(count: int) -> int:
    """The rows of the step that processes `count` sequences: few sizes, because each costs a plan."""
    return 1 << (count - 1).bit_length() if count <= MAX_ROWS else padded(count, MAX_ROWS)


class BatchDecoder(DecodePlans):
    """The plans of one adapter, or of none, for batches of up to MAX_SEQUENCES rows in turn."""

    def __init__(self, shared: Shared, adapter: AdapterBuffers | None):
        super().__init__(shared, adapter, MAX_SEQUENCES)
        self.device.write(self.state, CLEAN)
        self._scores: dict[tuple[int, int], Plan] = {}

    def lengthen(self, rows: Sequence[Row]) -> None:
        """Under longrope, the frequencies of a sequence change once it is long: all of it is processed again."""
        longest = self.model.config.longest_short
        for row in rows if longest is not None else ():
            if row.long != (len(row.ids) > longest):
                row.long, row.done = not row.long, 0

    def _columns(self, row: Row, positions: np.ndarray) -> tuple:
        """The rows of the RoPE tables, and the slots, of some positions."""
        return self.ropes.rows_of(positions, np.full(len(positions), len(row.ids))), row.slots.start + positions

    # Prefill

    def prefill(self, rows: Sequence[Row]) -> list[tuple[Row, int, range]]:
        """One pass over what `rows` wait for, as much as fits: (sequence, its first token in the pass, its rows)."""
        passed, columns, used = [], [], 0
        for row in rows:
            if count := min(row.waits, self.prefill_rows - used):
                positions = np.arange(row.done, row.done + count)
                ids, start = np.array(row.ids[row.done : row.done + count]), np.full(count, row.slots.start)
                columns.append(np.stack([ids, *self._columns(row, positions), start], 1))
                passed.append((row, row.done, range(used, used + count)))
                row.done, used = row.done + count, used + count
        if columns:
            self._pass = self.write_prefill(np.concatenate(columns))
            self.prefill_plan(self._pass)[0].run("forward")
        return passed

    def prompt_logits(self, rows: range):
        """Yields (rows, their logits f32 [len(rows), V]) for rows of the last prefill pass, some at a time. Waits."""
        for start in range(rows.start // SCORED * SCORED, rows.stop, SCORED):
            self._score_plan(self._pass, start).run("head")
            some = range(max(start, rows.start), min(start + SCORED, rows.stop))
            yield some, self._read(some.start - start, some.stop - start)

    def _score_plan(self, rows: int, start: int) -> Plan:
        """The head on SCORED rows of a pass, or as many as there are, into `logits`, which no step needs just then."""
        if (rows, start) not in self._scores:
            plan, count = Plan(self.device, self.shared.kernels), min(SCORED, rows - start)
            self._head_work.rewind()
            c = replace(self._context(plan, count, self.prefill_data.rows(count)), work=self._head_work)
            n, rstd = (tensor.view(0, (count, *tensor.shape[1:])) for tensor in self._normed)
            logits = self.logits.rows(0, count)
            with plan.section("head"):
                hidden, adapter = self.prefill_plan(rows)[1].rows(start, start + count), HeadAdapter.take(c, count)
                logits_forward(c, logits, n, rstd, hidden, count, adapter)
                cap_logits(c, logits, count)
            self._scores[rows, start] = plan
        return self._scores[rows, start]

    @cached_property
    def _head_work(self) -> Workspace:
        """Scratch of the head: that of passes holds the hidden states."""
        return Workspace(self.device)

    @cached_property
    def _normed(self) -> tuple:
        """The head's input, and its 1 / rms."""
        shapes = {"norm": (SCORED, self.model.hidden), "rstd": (SCORED,)}
        return tuple(self.device.tensor(shape, label=name, kind="activations") for name, shape in shapes.items())

    def _read(self, start: int, stop: int) -> np.ndarray:
        return self.device.read(self.logits.rows(start, stop))[:, : self.model.config.vocab_size]

    # Steps

    def begin(self, rows: Sequence[Row]) -> None:
        """Prepare steps of these sequences, all of whose tokens but the last are in the cache."""
        spare = step_rows(len(rows)) - len(rows)
        rows = [*rows, *[rows[-1]] * spare]  # spare rows repeat the last one, so they write the same values
        columns = [self._columns(row, np.array([len(row.ids) - 1])) for row in rows]
        self.write_rows(
            ids=[row.ids[-1] for row in rows],
            position=[int(position[0]) for position, _ in columns],
            slot=[int(slot[0]) for _, slot in columns],
            kv_start=[row.slots.start for row in rows],
            end=[row.slots.stop for row in rows],
            stream=[row.stream for row in rows],
        )
        self.device.write_at(self.buffers.settings, 0, pack_settings([row.sampling for row in rows]))
        for i, row in enumerate(rows):
            if row.sampling.repetition_penalty != 1:
                bits = seen_bits(row.ids, self.buffers.vocab)
                self.device.write_at(self.buffers.seen, i * bits.size, bits)

    def step(self, rows: Sequence[Row]) -> list:
        """The dispatches of one step: process the last token of each row, and choose its next one."""
        return list(chain(*self.step_records(step_rows(len(rows)), [row.sampling for row in rows])))

    def read_logits(self, row: int) -> np.ndarray:
        """The logits from which a row's last token was chosen, float32 [V]. Waits for the GPU."""
        return self._read(row, row + 1)[0]

    def recover(self, rows: Sequence[Row]) -> str:
        """After a value that was not finite: returns where the first one was, and clears the slots of `rows`, because
        attention multiplies even slots that no row sees by 0."""
        where = self.first_bad()
        for tensor in {id(t): t for layer in self.cache.layers for t in layer}.values():
            for row in rows:
                zeros = np.zeros((len(row.slots), tensor.shape[1]), np.float32)
                self.device.write_at(tensor, row.slots.start * tensor.shape[1], zeros)
        self.device.write(self.state, CLEAN)
        return where


def encode(batches: Sequence[tuple[BatchDecoder, Sequence[Row]]], tokens: int):
    """Commands that choose `tokens` tokens for the rows of each batch, one batch after another."""
    records = [record for decoder, rows in batches for record in decoder.step(rows) * tokens]
    return batches[0][0].step_plan(step_rows(len(batches[0][1]))).encode(records)
