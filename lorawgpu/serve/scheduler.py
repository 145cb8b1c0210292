"""The one thread that owns the GPU: it admits answers from a queue, and decodes those it has in turns.

A turn is a prefill pass of each adapter that has new prompts, then a chunk of tokens for every answer: a batch for each
adapter, one after another in one submit. New answers join between two chunks, if the cache has room. A chunk is as long
as LATENCY allows; that affects when tokens arrive, never which.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from lorawgpu.errors import CheckFailed
from lorawgpu.generate.batch import BatchDecoder, Row, encode
from lorawgpu.generate.generator import LATENCY, MAX_CHUNK, NO_TOKEN
from lorawgpu.generate.slots import Slots
from lorawgpu.gpu import device_errors
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.scores import Score, scores_of


@dataclass(eq=False)
class Choice:
    """One answer that is being generated. `limit`: tokens that it may have; `top`: alternatives whose log-probabilities
    are wanted, None for no log-probabilities; `echo`: those of the prompt too."""

    row: Row
    decoder: BatchDecoder
    stop_ids: frozenset[int]
    limit: int
    top: int | None = None
    echo: bool = False
    prompt: int = field(init=False)
    cancelled: bool = False

    def __post_init__(self):
        self.prompt = len(self.row.ids)

    @property
    def left(self) -> int:
        return self.limit - (len(self.row.ids) - self.prompt)

    @property
    def fresh(self) -> bool:
        """Whether it has no token yet."""
        return len(self.row.ids) == self.prompt

    @property
    def ready(self) -> bool:
        return not self.row.waits


@dataclass
class Turn:
    """What a turn did for an answer: `tokens` with their `scores`, if wanted, or scores of the prompt but its first
    token. `reason`: why it ended ("stop", "length"), or `error`."""

    choice: Choice
    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None


class Scheduler:
    """`deliver`: called in the scheduler's thread with what each turn did. `failed`: called once with what ended it."""

    def __init__(
        self,
        slots: int,
        sequences: int,
        waiting: int,
        deliver: Callable[[list[Turn]], None],
        failed: Callable[[BaseException], None],
    ):
        self.slots, self.sequences, self.most_waiting = Slots(slots), sequences, waiting
        self.deliver, self.failed = deliver, failed
        self.active: list[Choice] = []
        self.waiting: deque[Choice] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock, self._queued = threading.Lock(), 0  # answers handed over that have no place yet
        self._size = 1  # tokens of the next chunk
        self._ahead: tuple | None = None  # the batches of the next chunk, its length, and its commands
        self._first = 0  # number of the next token in the history of the batches
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="scheduler")

    # From other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its turn."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, choices: Sequence[Choice]) -> None:
        """Queue answers. ApiError if too many wait, or the device has failed."""
        with self._lock:
            self._check()
            free = max(0, self.sequences - len(self.active))
            if self._queued + len(choices) > self.most_waiting + free:
                raise ApiError(429, "The server is busy: too many answers wait. Try again later.", code="queue_full")
            self._queued += len(choices)
            self._inbox.put(lambda: self.waiting.extend(choices))

    def cancel(self, choices: Sequence[Choice]) -> None:
        """Nobody wants these any more: their places become free at the next turn."""
        for choice in choices:
            choice.cancelled = True
        self._inbox.put(lambda: None)  # wakes it up

    def call(self, function: Callable[[], object]) -> Future:
        """`function()`, in the thread that owns the GPU. ApiError if the device has failed."""
        future: Future = Future()

        def run():
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is wanted
                future.set_exception(error)

        with self._lock:
            self._check()
            self._inbox.put(run)
        return future

    def _check(self) -> None:
        if self._error:
            raise ApiError(503, f"The server cannot compute any more: {self._error}.")

    # In the thread

    def _run(self) -> None:
        try:
            with device_errors():
                while self._receive():
                    self._drop_cancelled()
                    self._admit()
                    self._prefill()
                    self._decode()
        except BaseException as error:
            with self._lock:
                self._error = error
            while not self._inbox.empty():  # what came before that is answered too
                if message := self._inbox.get():
                    message()
            self.deliver([Turn(choice, error=error) for choice in [*self.active, *self.waiting]])
            self.failed(error)

    def _receive(self) -> bool:
        """Take what other threads sent; wait for it if there is nothing to do. False at the end."""
        busy = bool(self.active or self.waiting)
        while True:
            try:
                message = self._inbox.get(block=not busy)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            busy = True

    def _drop_cancelled(self) -> None:
        for choice in [c for c in self.active if c.cancelled]:
            self._leave(choice)
        dropped = len(self.waiting)
        self.waiting = deque(c for c in self.waiting if not c.cancelled)
        self._admitted(dropped - len(self.waiting))

    def _admitted(self, count: int) -> None:
        with self._lock:
            self._queued -= count

    def _admit(self) -> None:
        """Give places to those who have waited longest. Nobody overtakes, so a long one gets its turn."""
        while self.waiting and len(self.active) < self.sequences:
            choice = self.waiting[0]
            slots = self.slots.take(choice.prompt + choice.limit)
            if slots is None:
                return
            self.waiting.popleft()
            choice.row.slots = slots
            self.active.append(choice)
            self._admitted(1)

    def _leave(self, choice: Choice) -> None:
        self.active.remove(choice)
        self.slots.give(choice.row.slots)

    def _by_adapter(self, choices: Sequence[Choice]) -> list[tuple[BatchDecoder, list[Choice]]]:
        batches: dict[int, tuple[BatchDecoder, list[Choice]]] = {}
        for choice in choices:
            batches.setdefault(id(choice.decoder), (choice.decoder, []))[1].append(choice)
        return list(batches.values())

    def _prefill(self) -> None:
        found = []
        for decoder, choices in self._by_adapter(self.active):
            decoder.lengthen([c.row for c in choices])
            of = {id(c.row): c for c in choices}
            for row, first, rows in decoder.prefill([c.row for c in choices if not c.ready]):
                if (choice := of[id(row)]).echo:
                    found.append(Turn(choice, prompt_scores=self._prompt_scores(choice, first, rows)))
        for choice in [c for c in self.active if c.ready and not c.left]:  # only the prompt was wanted
            self._leave(choice)
            found.append(Turn(choice, reason="length"))
        if found:
            self.deliver(found)

    def _prompt_scores(self, choice: Choice, first: int, rows: range) -> list[Score]:
        """Those of the tokens after the tokens of a pass."""
        scores = []
        for some, logits in choice.decoder.prompt_logits(rows):
            at = first + some.start - rows.start + 1
            scores += scores_of(logits, choice.row.ids[at : at + len(some)], choice.top or 0)
        return scores

    def _decode(self) -> None:
        batches = self._by_adapter([c for c in self.active if c.ready])
        if not batches:
            return
        if any(decoder.stepwise for decoder, _ in batches):  # what a step reads is written for one batch at a time
            for batch in batches:
                self._turn([batch])
        else:
            self._turn(batches)

    def _turn(self, batches: list[tuple[BatchDecoder, list[Choice]]]) -> None:
        rows = [(decoder, [c.row for c in choices]) for decoder, choices in batches]
        going = [c for _, choices in batches for c in choices]
        longest, single = max(c.left for c in going), self._single(going)
        if self._ahead and self._ahead[0] == rows and not single:
            _, tokens, commands = self._ahead
        else:
            tokens, self._first = 1 if single else min(self._size, longest), 0
            for decoder, some in rows:
                decoder.begin(some)
            commands = encode(rows, tokens)
        start = time.perf_counter()
        batches[0][0].submit(commands)
        after = 0 if single else min(self._size, longest - tokens)
        self._ahead = (rows, after, encode(rows, after)) if after else None
        chosen = [decoder.chosen(len(some), self._first, tokens) for decoder, some in rows]
        if not single:
            self._size = _next_size(tokens, time.perf_counter() - start)
        self._first += tokens
        found = [self._accept(*batch, ids) for batch, ids in zip(batches, chosen, strict=True)]
        self.deliver([turn for some in found for turn in some])

    def _single(self, going: list[Choice]) -> bool:
        """Whether the next chunk has one token: its logits are read, the host must know each token, or someone waits
        for the first one."""
        scored = any(c.top is not None for c in going)
        return scored or going[0].decoder.stepwise or len(going) < len(self.active) or any(c.fresh for c in going)

    def _accept(self, decoder: BatchDecoder, choices: list[Choice], chosen: np.ndarray) -> list[Turn]:
        if (chosen == NO_TOKEN).any():
            return self._fail(decoder, choices)
        found = [Turn(choice) for choice in choices]
        for i, (progress, ids) in enumerate(zip(found, chosen.tolist(), strict=True)):
            choice = progress.choice
            for token in ids:
                if token in choice.stop_ids or not choice.left:
                    progress.reason = "length" if token not in choice.stop_ids else "stop"
                    break
                if choice.top is not None:
                    progress.scores += scores_of(decoder.read_logits(i)[None], [token], choice.top)
                progress.tokens.append(token)
                choice.row.ids.append(token)
                choice.row.done += 1
            if progress.reason is None and not choice.left:
                progress.reason = "length"
            if progress.reason:
                self._leave(choice)
        return found

    def _fail(self, decoder: BatchDecoder, choices: list[Choice]) -> list[Turn]:
        """A value was not finite: all answers of this adapter end, and their slots are cleared for others."""
        where = decoder.recover([c.row for c in choices])
        error = CheckFailed(
            f"the model computed a value that is not finite, first in {where}; is the adapter damaged, or made for "
            "another model?"
        )
        for choice in choices:
            self._leave(choice)
        return [Turn(choice, error=error) for choice in choices]


def _next_size(tokens: int, seconds: float) -> int:
    """How many tokens of a chunk take LATENCY, after one that took `seconds`: at most twice as many as in that one."""
    return max(1, min(MAX_CHUNK, 2 * tokens, int(LATENCY * tokens / max(seconds, 1e-6))))
