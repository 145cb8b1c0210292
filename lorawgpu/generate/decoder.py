"""Decoding with a KV cache: prompts go in as flat rows, then each step processes one token of every sequence.

start, extend   process tokens: all but the last of each sequence in a prefill pass, the last ones in a decode step
encode, submit  choose tokens on the GPU and process them in decode steps; the host reads the tokens later
"""

from collections.abc import Sequence

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.generate.plans import CLEAN, DecodePlans, Shared
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import KernelCache, Plan
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.model.kv_cache import KVCache
from lorawgpu.ops.decode_state import MAX_SEQUENCES
from lorawgpu.ops.sample import RING, pack_settings, seen_bits
from lorawgpu.weights.device_model import Model


class Decoder(DecodePlans):
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
        cache = KVCache.create(device, model.config, sequences, context)
        pass_rows = max(min(prefill_rows, context), sequences)
        shared = Shared.create(device, model, cache, cache.span, pass_rows, kernels)
        super().__init__(shared, adapter, sequences, matvec)
        self.context = context
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self._long = [False] * sequences  # whether the cache of a sequence was made with longrope's long frequencies

    # Running

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
            sequence, ids, position = np.array(flat[begin : begin + self.prefill_rows]).T
            first = sequence * self.cache.span
            columns = ids, self._rope_rows(sequence, position), first + position, first
            self.prefill_plan(self.write_prefill(np.stack(columns, 1)))[0].run("forward")
        self._write_rows(count)
        self.step_plan(count).run("forward")

    def _rope_rows(self, sequence, position) -> np.ndarray:
        lengths = np.array([len(held) for held in self.held])
        return self.ropes.rows_of(position, lengths[sequence])

    def _write_rows(self, count: int) -> None:
        """Write the state of the first `count` sequences: the last token of each is the next input."""
        sequence, position = np.arange(count), np.array([len(held) - 1 for held in self.held[:count]])
        first, ids = sequence * self.cache.span, [held[-1] for held in self.held[:count]]
        values = {"ids": ids, "position": self._rope_rows(sequence, position), "slot": first + position}
        self.write_rows(**values, kv_start=first, end=first + self.context, stream=self.streams[:count])

    def read_logits(self, count: int) -> np.ndarray:
        """The logits of the first `count` sequences, float32 [count, V]. Waits for the GPU."""
        return self.device.read(self.logits.rows(0, count))[:, : self.model.config.vocab_size]

    # Sampling

    def sample(self, sampling: Sampling, count: int) -> None:
        """Prepare to choose tokens for the first `count` sequences."""
        self.device.write_at(self.buffers.settings, 0, pack_settings([sampling] * count))
        for b in range(count):
            bits = seen_bits(self.held[b], self.buffers.vocab)
            self.device.write_at(self.buffers.seen, b * bits.size, bits)

    def records(self, count: int, sampling: Sampling) -> list:
        """The dispatches that choose a token for each of `count` sequences and, unless `stepwise`, process it."""
        forward, chosen = self.step_records(count, [sampling])
        return chosen if self.stepwise else [*chosen, *forward]

    def encode(self, count: int, tokens: int, sampling: Sampling):
        """Commands that choose and process `tokens` tokens, at most RING, for each of `count` sequences."""
        if not 0 < tokens <= RING:
            raise ValueError(f"{tokens} tokens at once; wanted 1 to {RING}")
        return self.step_plan(count).encode(self.records(count, sampling) * tokens)

    def recover(self) -> str:
        """After a value that was not finite: returns where the first one was, and clears the cache, because attention
        multiplies even invisible slots by 0."""
        where, plan = self.first_bad(), Plan(self.device, self.shared.kernels)
        with plan.section("clear"):
            for tensor in (t for layer in self.cache.layers for t in layer):
                plan.clear(tensor)
        plan.run("clear")
        self.held = [[] for _ in self.held]
        return where
