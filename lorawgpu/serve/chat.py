"""POST /v1/chat/completions."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

from lorawgpu.data.formats import to_example
from lorawgpu.serve.answers import Deltas, Service, check_text
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.models import Served
from lorawgpu.serve.schema import ChatRequest
from lorawgpu.serve.text import Delta, Spelled
from lorawgpu.serve.tool_calls import Call, CallReader


class ChatAnswer:
    """A checked request whose prompt is tokenized: its answers as one object, or as a stream of chunks."""

    def __init__(self, service: Service, request: ChatRequest, served: Served, ids: list[int]):
        self.request, self.served, self.prompt = request, served, len(ids)
        self.tools = request.tools if request.tool_choice != "none" else None
        top = (request.top_logprobs or 0) if request.logprobs else None
        limit, param = request.max_completion_tokens, "max_completion_tokens"
        if limit is None:
            limit, param = request.max_tokens, "max_tokens"
        self.choices = service.choices(request, served, [ids], limit, param, top)
        marks = served.marks if self.tools else {}
        self.deltas = Deltas(service, self.choices, served, request.stops, marks, strip=True)
        self.readers = [self._reader() for _ in self.choices]
        self.head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}

    def _reader(self) -> CallReader | None:
        names = {tool.function.name for tool in self.tools or ()}
        return CallReader(self.served.tools, names) if names and self.served.tools else None

    def _read(self, number: int, delta: Delta) -> tuple[str, list[Call]]:
        """The content that is new, and at the end the calls."""
        if (reader := self.readers[number]) is None:
            return delta.text, []
        text = reader.push(delta.text)
        if delta.reason is None:
            return text, []
        rest, calls = reader.finish()
        return text + rest, calls

    async def whole(self) -> dict:
        found = await self.deltas.all()
        choices = [self._choice(number, deltas) for number, deltas in enumerate(found)]
        usage = self._usage(sum(deltas[-1].tokens for deltas in found))
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": usage}

    def _choice(self, number: int, deltas: list[Delta]) -> dict:
        parts = [self._read(number, delta) for delta in deltas]
        text, calls = "".join(text for text, _ in parts), parts[-1][1]
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        spelled = [token for delta in deltas for token in delta.spelled]
        return {
            "index": number,
            "message": message,
            "logprobs": self._logprobs(spelled),
            "finish_reason": "tool_calls" if calls else deltas[-1].reason,
        }

    async def chunks(self) -> AsyncIterator[dict]:
        """Chunks of `stream: true`; the last one has the usage, if it is wanted."""
        tokens = [0] * len(self.choices)
        for number in range(len(self.choices)):
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})
        async for number, delta in self.deltas:
            tokens[number] = delta.tokens
            text, calls = self._read(number, delta)
            if text or delta.spelled:
                yield self._chunk(number, {"content": text}, delta.spelled)
            if calls:
                yield self._chunk(number, {"tool_calls": [_tool_call(c) | {"index": i} for i, c in enumerate(calls)]})
            if delta.reason:
                yield self._chunk(number, {}, reason="tool_calls" if calls else delta.reason)
        if self.request.wants_usage:
            yield self._part([], self._usage(sum(tokens)))

    def _chunk(self, number: int, delta: dict, spelled: list[Spelled] = (), reason: str | None = None) -> dict:
        logprobs = self._logprobs(spelled) if spelled else None
        return self._part([{"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _part(self, choices: list[dict], usage: dict | None = None) -> dict:
        part = {**self.head, "object": "chat.completion.chunk", "choices": choices}
        return part | {"usage": usage} if self.request.wants_usage else part

    def _usage(self, tokens: int) -> dict:
        return {"prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens}

    def _logprobs(self, spelled: list[Spelled]) -> dict | None:
        if not self.request.logprobs:
            return None
        content = [
            _token(s.bytes, s.logprob) | {"top_logprobs": [_token(name, logprob) for name, logprob in s.top]}
            for s in spelled
        ]
        return {"content": content, "refusal": None}


def _token(name: bytes, logprob: float) -> dict:
    return {"token": name.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(name)}


def _tool_call(call: Call) -> dict:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def answer_chat(service: Service, request: ChatRequest) -> ChatAnswer:
    """Tokenize the conversation of a request. ApiError or UserError for what is wrong with it."""
    if isinstance(request.tool_choice, dict) or request.tool_choice == "required":
        raise ApiError(400, "A tool cannot be forced: wanted 'auto' or 'none'.", "tool_choice", "unsupported_value")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    served = service.models.find(request.model)
    wanted = [] if request.tool_choice == "none" else request.tools or []
    tools = [tool.model_dump(exclude_none=True) for tool in wanted]
    chat = to_example("chat", {"messages": request.messages, "tools": tools}, ("the request", 1))

    check_text(len(str(chat.messages)) + len(str(chat.tools)), service.context)

    def tokenize() -> list[int]:
        prompts = service.models.prompts_with(served, request.chat_template_kwargs)
        return prompts.chat(chat.messages, chat.tools)

    ids = await asyncio.to_thread(tokenize)
    return ChatAnswer(service, request, served, ids)
