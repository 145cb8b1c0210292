"""Generates token ids from prompts of token ids; the GPU chooses the tokens, and the host only reads them."""

import time
from collections.abc import Iterator, Sequence

from lorawgpu.errors import CheckFailed
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.sampling import Sampling

NO_TOKEN = 0xFFFFFFFF
MAX_CHUNK = 16  # tokens that are encoded and read at once
LATENCY = 0.03  # seconds of GPU work in a chunk, at most: longer pauses would be noticed


class Generator:
    """Runs a `Decoder` until every sequence has ended. `reasons[b]`: "stop", "length" or "context", once ended."""

    def __init__(self, decoder: Decoder, stop_ids: Sequence[int]):
        self.decoder, self.stop_ids = decoder, frozenset(stop_ids)
        self.reasons: list[str | None] = []
        self._slow = False

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        max_new_tokens: int,
        streams: Sequence[int] | None = None,
        reuse: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Yields (sequence, token) one by one, without end tokens.

        Encoding runs a chunk ahead of the GPU, reading a chunk behind. A chunk is as long as LATENCY allows; that
        affects when tokens arrive, never which. Raises UserError for a prompt beyond the context, and CheckFailed if
        the model computes a value that is not finite.
        """
        decoder, count = self.decoder, len(prompts)
        decoder.start(prompts, streams, reuse)
        decoder.sample(sampling, count)
        rooms = [decoder.context - len(held) + 1 for held in decoder.held[:count]]
        limits = [min(max_new_tokens, room) for room in rooms]
        emitted = [0] * count
        self.reasons = [None if limit else "length" for limit in limits]
        if None not in self.reasons:
            return
        if decoder.stepwise:
            yield from self._stepwise(count, sampling, emitted, limits, max_new_tokens)
            return
        first, size, read = 0, 1, time.perf_counter()
        decoder.submit(decoder.encode(count, size, sampling))
        while True:
            after = min(size if self._slow else min(2 * size, MAX_CHUNK), max(limits) - first - size)
            ahead = decoder.encode(count, after, sampling) if after else None
            chosen = decoder.chosen(count, first, size)
            read, self._slow = time.perf_counter(), time.perf_counter() - read > LATENCY
            accepted = self._accept(chosen, emitted, limits, max_new_tokens)
            if going := None in self.reasons:  # then the longest limit is not reached, so `ahead` exists
                decoder.submit(ahead)
            yield from accepted
            if not going:
                return
            first, size = first + size, after

    def _stepwise(self, count: int, sampling: Sampling, emitted: list, limits: list, max_new_tokens: int):
        """As `stream`, for a decoder that processes a token only after the host has seen it."""
        decoder = self.decoder
        while True:
            decoder.submit(decoder.encode(count, 1, sampling))
            yield from self._accept(decoder.chosen(count, 0, 1), emitted, limits, max_new_tokens)
            if None not in self.reasons:
                return
            decoder.advance(count)

    def _accept(self, chosen, emitted: list, limits: list, max_new_tokens: int) -> list:
        """The tokens of a chunk that belong to answers, in order; marks sequences that end."""
        accepted = []
        for column in chosen.T.tolist():
            for b, token in enumerate(column):
                if self.reasons[b]:
                    continue
                if token == NO_TOKEN:
                    raise CheckFailed(
                        f"the model computed a value that is not finite, first in {self.decoder.recover()}; "
                        "is the adapter damaged, or made for another model?"
                    )
                if token in self.stop_ids:
                    self.reasons[b] = "stop"
                    continue
                accepted.append((b, token))
                emitted[b] += 1
                if len(self.decoder.held[b]) < self.decoder.context:
                    self.decoder.held[b].append(token)
                if emitted[b] == limits[b]:
                    self.reasons[b] = "length" if limits[b] == max_new_tokens else "context"
        return accepted
