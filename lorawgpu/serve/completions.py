"""POST /v1/completions: text is continued as it is. With `echo` and `logprobs`, the prompt is scored too."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

from lorawgpu.generate.prompts import Prompts
from lorawgpu.serve.answers import Deltas, Service, check_ids, check_text
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.models import Served
from lorawgpu.serve.schema import CompletionRequest
from lorawgpu.serve.text import Delta, Spelled
from lorawgpu.tokenizer.hf import Tokenizer

DEFAULT_TOKENS = 16  # OpenAI's max_tokens


class CompletionAnswer:
    """A checked request whose prompts are token ids, `echoed` their texts and first tokens if `echo` is set."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        served: Served,
        prompts: list[list[int]],
        echoed: list[tuple[str, bytes]],
    ):
        self.request, self.echoed, self.n = request, echoed, request.n or 1
        self.prompt = sum(map(len, prompts))
        limit = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        scored = bool(request.echo) and request.logprobs is not None
        self.choices = service.choices(request, served, prompts, limit, "max_tokens", request.logprobs, scored)
        self.deltas = Deltas(service, self.choices, served, request.stops, {}, strip=False)
        self.lengths = [0] * len(self.choices)  # characters of each text that its `logprobs` have come to
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    async def whole(self) -> dict:
        found = await self.deltas.all()
        choices = [self._whole_choice(number, deltas) for number, deltas in enumerate(found)]
        return {**self.head, "choices": choices, "usage": self._usage(sum(deltas[-1].tokens for deltas in found))}

    def _whole_choice(self, number: int, deltas: list[Delta]) -> dict:
        joined = Delta(
            "".join(delta.text for delta in deltas),
            spelled=[token for delta in deltas for token in delta.spelled],
            prompt=[token for delta in deltas for token in delta.prompt],
            reason=deltas[-1].reason,
        )
        return self._choice(number, joined, first=True)

    async def chunks(self) -> AsyncIterator[dict]:
        """Parts of `stream: true`; the last one has the usage, if it is wanted."""
        begun, tokens = [False] * len(self.choices), [0] * len(self.choices)
        async for number, delta in self.deltas:
            tokens[number] = delta.tokens
            if delta.text or delta.spelled or delta.prompt or delta.reason:
                yield self._part([self._choice(number, delta, first=not begun[number])])
                begun[number] = True
        if self.request.wants_usage:
            yield self._part([], self._usage(sum(tokens)))

    def _part(self, choices: list[dict], usage: dict | None = None) -> dict:
        part = {**self.head, "choices": choices}
        return part | {"usage": usage} if self.request.wants_usage else part

    def _choice(self, number: int, delta: Delta, first: bool) -> dict:
        """One choice; the first part of an echoed one begins with its prompt."""
        text, name = self.echoed[number // self.n] if self.request.echo and first else ("", None)
        return {
            "index": number,
            "text": text + delta.text,
            "logprobs": self._logprobs(number, delta, name),
            "finish_reason": delta.reason,
        }

    def _logprobs(self, number: int, delta: Delta, name: bytes | None) -> dict | None:
        if self.request.logprobs is None:
            return None
        spelled: list[Spelled | None] = [*delta.prompt, *delta.spelled]
        names, scores = [_text(s.bytes) for s in spelled], [s.logprob for s in spelled]
        tops = [{_text(top): logprob for top, logprob in _with_own(s)} for s in spelled]
        if name is not None:  # nothing comes before the first token of a prompt
            names, scores, tops = [_text(name), *names], [None, *scores], [None, *tops]
        offsets = []
        for token in names:
            offsets.append(self.lengths[number])
            self.lengths[number] += len(token)
        return {
            "tokens": names,
            "token_logprobs": scores,
            "top_logprobs": tops if self.request.logprobs else None,
            "text_offset": offsets,
        }

    def _usage(self, tokens: int) -> dict:
        return {"prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens}


def _with_own(spelled: Spelled) -> list[tuple[bytes, float]]:
    """The likeliest tokens, and the chosen one, which need not be among them."""
    return [*spelled.top, (spelled.bytes, spelled.logprob)]


def _text(name: bytes) -> str:
    """A token as text, spelled as OpenAI does where its bytes are only part of a character."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


async def answer_completion(service: Service, request: CompletionRequest) -> CompletionAnswer:
    """Tokenize the prompts of a request. ApiError or UserError for what is wrong with them."""
    if request.best_of not in (None, request.n or 1):
        raise ApiError(400, "best_of is not supported: leave it out.", "best_of", "unsupported_value")
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(400, "max_tokens 0 needs echo: true.", "max_tokens", "invalid_value")
    served, given = service.models.find(request.model), request.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    check_text(max(len(p) for p in several), service.context)
    ids, echoed = await asyncio.to_thread(_tokenized, served.prompts, several, bool(request.echo), service)
    return CompletionAnswer(service, request, served, ids, echoed)


def _tokenized(prompts: Prompts, several: list, echo: bool, service: Service) -> tuple[list, list]:
    ids = [prompts.raw(p) if isinstance(p, str) else p for p in several]
    for some in ids:
        check_ids(some, service.models.config.vocab_size)
    if not echo:
        return ids, []
    tokenizer = prompts.tokenizer
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in several]
    return ids, [(text, tokenizer.call(Tokenizer.token_bytes, some[0])) for text, some in zip(texts, ids, strict=True)]
