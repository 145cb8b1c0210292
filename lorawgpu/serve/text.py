"""Tokens to text, in a thread and a worker process of their own: the GPU does not wait for it.

A token's text may depend on the tokens before it, and characters and stop strings may span tokens. So the worker keeps
nothing, and is sent the end of each answer again; stop strings are found here, which tells the scheduler.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import TextStream
from lorawgpu.guard import Worker
from lorawgpu.serve.scheduler import Choice, Turn
from lorawgpu.serve.scores import Score
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import Tokenizer

Marks = dict[int, str]  # control tokens that are shown, because something reads them, such as those of tool calls


@dataclass(frozen=True)
class Spelled:
    """A token with its score. `top`: the likeliest tokens' bytes and log-probabilities."""

    bytes: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(frozen=True)
class Delta:
    """What is new of an answer. `tokens`: how many it has so far; `spelled`: those that are new, `prompt`: those of the
    prompt from its second one on, if their log-probabilities are wanted."""

    text: str = ""
    tokens: int = 0
    spelled: list[Spelled] = field(default_factory=list)
    prompt: list[Spelled] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Job:
    """For the worker: the end of an answer as TextStream keeps it, its new tokens, and tokens to spell."""

    tail: list[int]
    shown: int
    strip: bool
    tokens: list[int]
    last: bool
    marks: Marks
    spell: list[int]


@dataclass(frozen=True)
class _Done:
    """`pieces`: the text that each new token completes, and after the last one what is left over."""

    tail: list[int]
    shown: int
    strip: bool
    pieces: list[str]
    spelled: list[bytes]


def _work(tokenizer: Tokenizer, jobs: list[_Job]) -> list[_Done]:
    return [_advance(tokenizer, job) for job in jobs]


def _advance(tokenizer: Tokenizer, job: _Job) -> _Done:
    stream, pieces = TextStream.resumed(tokenizer, job.tail, job.shown, job.strip), []
    for token in job.tokens:
        if token in job.marks:
            pieces.append(stream.finish() + job.marks[token])
            stream = TextStream(tokenizer)
        else:
            pieces.append(stream.push(token))
    rest = [stream.finish()] if job.last else []
    return _Done(*stream.state, pieces + rest, [tokenizer.token_bytes(token) for token in job.spell])


class StopStrings:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self._held = stops, ""

    def push(self, text: str, last: bool = False) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop string ends it."""
        text = self._held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
        keep = 0 if last else max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


@dataclass(eq=False)
class AnswerText:
    """The text of a choice on its way to `sink`, which is called with what is new of it."""

    choice: Choice
    tokenizer: GuardedTokenizer
    sink: Callable[[Delta], None]
    stops: StopStrings
    marks: Marks = field(default_factory=dict)
    strip: bool = False  # the space that `Prompts.chat` left out
    tokens: int = 0
    ended: bool = False
    tail: list[int] = field(default_factory=list)
    shown: int = 0

    def job(self, progress: Turn) -> _Job:
        scores = [*progress.prompt_scores, *progress.scores]
        spell = [token for score in scores for token in (score.token, *(token for token, _ in score.top))]
        last = progress.reason is not None
        return _Job(self.tail, self.shown, self.strip, progress.tokens, last, self.marks, spell)

    def delta(self, progress: Turn, done: _Done) -> Delta:
        """What is new. A stop string ends the answer with the token that completes it."""
        self.tail, self.shown, self.strip = done.tail, done.shown, done.strip
        names = iter(done.spelled)
        prompt, spelled = (
            [_spelled(score, names) for score in scores] for scores in (progress.prompt_scores, progress.scores)
        )
        text, reason, before = "", progress.reason, self.tokens
        for number, piece in enumerate(done.pieces):
            shown, stopped = self.stops.push(piece)
            text += shown
            self.tokens = min(before + number + 1, before + len(progress.tokens))
            if stopped:
                reason, spelled = "stop", spelled[: number + 1]
                break
        else:
            text += self.stops.push("", last=True)[0] if reason else ""
        self.ended = reason is not None
        return Delta(text, self.tokens, spelled, prompt, reason)


def _spelled(score: Score, names: Iterator[bytes]) -> Spelled:
    own = next(names)
    return Spelled(own, score.logprob, [(next(names), logprob) for _, logprob in score.top])


class Texts:
    """`stopped`: called with the choices that a stop string ended, which the scheduler does not know."""

    def __init__(self, stopped: Callable[[Sequence[Choice]], None]):
        self.stopped = stopped
        self._answers: dict[Choice, AnswerText] = {}
        self._inbox: queue.SimpleQueue[list[Turn] | None] = queue.SimpleQueue()
        self._worker = Worker()
        self._thread = threading.Thread(target=self._run, daemon=True, name="texts")

    def start(self) -> None:
        self._worker.start(__name__)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._worker.close()

    def expect(self, answers: Sequence[AnswerText]) -> None:
        """Take what is delivered for these choices, until they end or are forgotten."""
        self._answers |= {answer.choice: answer for answer in answers}

    def forget(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            self._answers.pop(choice, None)

    def deliver(self, progress: list[Turn]) -> None:
        """What the scheduler did. Does not wait."""
        self._inbox.put(progress)

    def _run(self) -> None:
        while (progress := self._inbox.get()) is not None:
            known = [(answer, p) for p in progress if (answer := self._answers.get(p.choice)) and not answer.ended]
            by_tokenizer: dict[int, list[tuple[AnswerText, Turn]]] = {}
            for answer, p in known:
                by_tokenizer.setdefault(id(answer.tokenizer), []).append((answer, p))
            for some in by_tokenizer.values():
                self._convert(some)

    def _convert(self, some: list[tuple[AnswerText, Turn]]) -> None:
        """One call of the worker for all answers of a tokenizer; if it fails, one for each, so that one fails alone."""
        wanted = [(answer, p) for answer, p in some if p.error is None]
        try:
            jobs = [answer.job(p) for answer, p in wanted]
            done = self._worker.call(_work, wanted[0][0].tokenizer, jobs) if wanted else []
        except UserError as error:
            if len(some) > 1:
                for one in some:
                    self._convert([one])
                return
            some[0][1].error, wanted, done = error, [], []
        for answer, p in some:
            if p.error is not None:
                answer.ended = True
                answer.sink(Delta(error=p.error))
        for (answer, p), result in zip(wanted, done, strict=True):
            answer.sink(answer.delta(p, result))
        ended = [answer.choice for answer, _ in some if answer.ended]
        self.stopped([c for c in ended if c.left])
        self.forget(ended)
