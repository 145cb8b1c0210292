"""The requests of the API, as OpenAI documents them. Types are strict; an unknown parameter is refused by name, and a
long list at its first fault: a body of millions of faults must not become millions of errors.

`top_k`, `min_p`, `repetition_penalty` and `chat_template_kwargs` are extensions that other servers have too.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json

from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.limits import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PATH,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOOLS,
)
from lorawgpu.util.suggest import nearest

MAX_TOKENS = 1 << 31
MAX_ID = (1 << 31) - 1
MAX_PARAMETERS = 100  # of a request, far more than there are
NOT_SUPPORTED = {  # parameters of OpenAI's that would change the answer, and the values that do not
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "reasoning_effort": (None,),
}

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Body = TypeVar("Body", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Lenient(BaseModel):
    """An object within a request. What else clients put into it changes nothing."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Lenient):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Answering(_Strict):
    """What both endpoints have."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    # Extensions
    top_k: Annotated[int, Field(ge=-1, lt=1 << 32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    # What would change the answer if it were not at its default; see NOT_SUPPORTED
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Any] | None = None
    # What is about the client's account
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Function(_Lenient):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Lenient):
    type: Literal["function"]
    function: Function


class ChatRequest(_Answering):
    """POST /v1/chat/completions. Messages are checked by `data.formats`, as those of a data set."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=MAX_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _prompt(value: object) -> object:
    """Text, token ids, or a list of either; looked at only up to the first fault."""
    several = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    fine = isinstance(value, str) or _is_ids(value)
    if fine or several and (all(isinstance(v, str) for v in value) or all(map(_is_ids, value))):
        return value
    raise ValueError(f"wanted a string, token ids, or a list of up to {MAX_CHOICES} of either")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int and 0 <= v <= MAX_ID for v in value)


class CompletionRequest(_Answering):
    """POST /v1/completions. A prompt is text or token ids, or a list of them."""

    prompt: Annotated[Any, AfterValidator(_prompt)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None


class LoadAdapter(_Strict):
    """POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]


class UnloadAdapter(_Strict):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name


def parse(kind: type[Body], body: bytes) -> Body:
    """The request in a body. ApiError that names what is wrong with it."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {error}.") from None
    if not isinstance(data, dict):
        raise ApiError(400, "The body of your request must be a JSON object.")
    if len(data) > MAX_PARAMETERS:
        raise ApiError(400, f"The body of your request has {len(data):,} parameters; no request has so many.")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _refused(kind, error) from None
    if getattr(request, "stream_options", None) and not request.stream:
        raise ApiError(400, "stream_options needs stream: true.", "stream_options", "invalid_value")
    for name, fine in NOT_SUPPORTED.items():
        if getattr(request, name, None) not in fine:
            raise ApiError(400, f"{name} is not supported: leave it out.", name, "unsupported_value")
    return request


def _refused(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first problem. One of a union is reported where it got furthest."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max((p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]), key=lambda p: len(p["loc"]))
    if problem["type"] == "extra_forbidden":
        name = problem["loc"][-1]
        meant = nearest(str(name), kind.model_fields) if len(problem["loc"]) == 1 else None
        hint = f" Did you mean {meant}?" if meant else ""
        return ApiError(400, f"Unrecognized request argument supplied: {name!s:.100}.{hint}", str(name)[:100])
    names = [part if isinstance(part, int) else str(part)[:100] for part in problem["loc"]]
    names = [n for n in names if isinstance(n, int) or not any(c in n for c in "[({ ")]  # without the types of a union
    param = "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in names).removeprefix(".")
    if problem["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    why = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid value for '{param}': {why}.", param, "invalid_value")
