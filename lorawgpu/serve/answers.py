"""From a checked request to the answers that are being generated, and what is new of them, as it comes."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence

from lorawgpu.errors import UserError
from lorawgpu.generate.batch import Row
from lorawgpu.generate.sampling import TINY, Sampling
from lorawgpu.serve.errors import ApiError, too_long
from lorawgpu.serve.limits import MAX_CHOICES, MAX_LETTERS
from lorawgpu.serve.models import Models, Served
from lorawgpu.serve.scheduler import Choice, Scheduler
from lorawgpu.serve.schema import ChatRequest, CompletionRequest
from lorawgpu.serve.text import AnswerText, Delta, Marks, StopStrings, Texts

TINY_P = 1e-9  # top_p 0 means the likeliest token


class Service:
    """Models, and the threads that compute. `context`: the most tokens of a prompt and its answer."""

    def __init__(self, models: Models, scheduler: Scheduler, texts: Texts, context: int):
        self.models, self.scheduler, self.texts, self.context = models, scheduler, texts, context

    def close(self) -> None:
        """End the threads."""
        self.scheduler.stop()
        self.texts.stop()

    def choices(
        self,
        request: ChatRequest | CompletionRequest,
        served: Served,
        prompts: Sequence[list[int]],
        limit: int | None,
        param: str,
        top: int | None,
        echo: bool = False,
    ) -> list[Choice]:
        """`n` answers for each prompt, in order. `limit`: the most tokens of one, as `param` says; None: as many as the
        context has room for. AnswerText i draws from stream i of the seed. ApiError for what has no room."""
        choices, sampling = [], sampling_of(request)
        if len(prompts) * (request.n or 1) > MAX_CHOICES:
            raise ApiError(400, f"{len(prompts)} prompts with n = {request.n}: at most {MAX_CHOICES} answers.", "n")
        for ids in prompts:
            check_ids(ids, self.models.config.vocab_size)
            room = self.context - len(ids)
            if room < (1 if limit is None else limit):
                raise too_long(len(ids), limit or 0, self.context, param)
            for _ in range(request.n or 1):
                row = Row(list(ids), sampling, stream=len(choices))
                most = room if limit is None else limit
                choices.append(Choice(row, served.decoder, served.stop_ids, most, top, echo))
        return choices


class Deltas:
    """What is new of some answers, as it comes: (number of the answer, Delta), until all have ended. `close` gives the
    places of those that have not back. ApiError if too many wait."""

    def __init__(
        self,
        service: Service,
        choices: Sequence[Choice],
        served: Served,
        stops: Sequence[str],
        marks: Marks,
        strip: bool,
    ):
        self.service, self.choices, self.going = service, choices, len(choices)
        self._loop, self._found = asyncio.get_running_loop(), asyncio.Queue()
        tokenizer = served.prompts.tokenizer
        service.texts.expect(
            [AnswerText(c, tokenizer, self._sink(i), StopStrings(stops), marks, strip) for i, c in enumerate(choices)]
        )
        try:
            service.scheduler.submit(choices)
        except ApiError:
            service.texts.forget(choices)
            raise

    def _sink(self, number: int) -> Callable[[Delta], None]:
        def sink(delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                self._loop.call_soon_threadsafe(self._found.put_nowait, (number, delta))

        return sink

    def __aiter__(self) -> "Deltas":
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self.going:
            raise StopAsyncIteration
        number, delta = await self._found.get()
        if delta.error is not None:
            raise _refusal(delta.error)
        self.going -= delta.reason is not None
        return number, delta

    def close(self) -> None:
        if self.going:
            self.service.texts.forget(self.choices)
            self.service.scheduler.cancel(self.choices)

    async def all(self) -> list[list[Delta]]:
        """All of them, by answer."""
        found: list[list[Delta]] = [[] for _ in self.choices]
        async for number, delta in self:
            found[number].append(delta)
        return found


def _refusal(error: Exception) -> ApiError:
    return ApiError(400 if isinstance(error, UserError) else 500, f"The answer could not be computed: {error}")


def sampling_of(request: ChatRequest | CompletionRequest) -> Sampling:
    """OpenAI's defaults: temperature 1, and another seed each time."""
    temperature = 1.0 if request.temperature is None else request.temperature
    return Sampling(
        temperature=0.0 if temperature < TINY else temperature,
        top_k=max(request.top_k or 0, 0),
        top_p=1.0 if request.top_p is None else max(request.top_p, TINY_P),
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        seed=secrets.randbits(64) if request.seed is None else request.seed % (1 << 64),
    ).check()


def check_text(characters: int, context: int) -> None:
    """ApiError for text that is far too long, before it is tokenized."""
    if characters > MAX_LETTERS * context:
        raise ApiError(400, f"Your prompt has {characters:,} characters; {context:,} tokens have no room for that.",
                       code="context_length_exceeded")  # fmt: skip


def check_ids(ids: Sequence[int], vocabulary: int) -> None:
    """ApiError for an empty prompt, or a token that the model does not have."""
    if not ids:
        raise ApiError(400, "The prompt is empty.", "prompt")
    if (beyond := max(ids)) >= vocabulary:
        raise ApiError(400, f"The prompt has token {beyond}, but the vocabulary has {vocabulary:,}.", "prompt")
