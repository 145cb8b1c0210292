"""Chat templates and masks: which characters of a rendered conversation an assistant wrote, for any template.

No template is searched for known strings. The conversation is rendered as it is, and once more with the content of a
turn replaced by a mark that occurs nowhere else: what stands before and after the mark is the template's, and what
the real render has between the same two is the turn's body. That is checked, not assumed: the real render must begin
with the one and end with the other. See `bodies`.

What is trained of a turn:
- its body: the content as the template shows it (stripped, with tool calls, ...), not the header before it;
- its end mark: the special token that closes the turn, with white space before it; where the template closes turns
  with ordinary text, that text. See `end_marks`.
A token belongs to a turn when it holds at least one of these characters: where the tokenizer merges the last
character of the header with the first of the content ("Assistant: Yes" -> ":" + " Yes"), the token is trained.
"""

import json
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorawgpu.data.templates import BUILT_IN
from lorawgpu.errors import UserError

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys under which a message's thoughts are published
Span = tuple[int, int]  # characters start..end of a render, end exclusive


class TemplateFailed(UserError):
    """The template raised, or hides a turn that should be trained; the caller adds file and line."""


class ChatTemplate:
    """A jinja2 template rendered in a sandbox with the globals that published templates expect.

    `special_tokens` (bos_token, eos_token, ...) are variables of the template. `strftime_now` answers with the moment
    of creation, so that a conversation renders alike each time. UserError when the text is no template.
    """

    def __init__(self, source: str, special_tokens: dict, now: datetime | None = None):
        self.source, self.special_tokens = source, dict(special_tokens)
        self.now = datetime.now() if now is None else now
        try:
            self._template = _environment(self.now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template is not valid jinja2: line {error.lineno}: {error.message}") from None

    def __reduce__(self):  # compiled templates do not pickle; worker processes compile their own
        return ChatTemplate, (self.source, self.special_tokens, self.now)

    def render(self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
        """The conversation as one text. TemplateFailed with the template's own words when it refuses."""
        try:
            return self._template.render(
                **self.special_tokens,
                messages=[_plain(m) for m in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is foreign code: it can raise anything
            raise TemplateFailed(f"the chat template refuses the conversation: {error}") from None


def resolve_template(name: str | None, jinja: str | None, own: str | None, special_tokens: dict) -> ChatTemplate | None:
    """The template a config asks for: a built-in by `name`, else `jinja` (a file or the text), else the model's own.

    None when nothing is asked for and the model has none. UserError for an unknown name or both at once.
    """
    if name is not None and jinja is not None:
        raise UserError("give either `chat_template` or `chat_template_jinja`, not both")
    if name is not None and name not in BUILT_IN:
        raise UserError(f"chat_template `{name}` is unknown; wanted one of {', '.join(BUILT_IN)}")
    if name is not None:
        return ChatTemplate(BUILT_IN[name], special_tokens)
    if jinja is not None:
        return ChatTemplate(_text_or_file(jinja), special_tokens)
    return None if own is None else ChatTemplate(own, special_tokens)


def bodies(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None, wanted: list[int]
) -> tuple[str, list[Span]]:
    """The render of a conversation, and where in it the bodies of the `wanted` messages (indices) are.

    TemplateFailed when the template does not show a wanted message, or shows it in a way that cannot be separated
    from what is not the message's own.
    """
    text = template.render(messages, tools)
    found = _all_at_once(template, messages, tools, wanted, text)
    if found is None:
        found = [_one(template, messages, tools, index, text) for index in wanted]
    return text, found


def _all_at_once(
    template: ChatTemplate, messages: list, tools: list | None, wanted: list[int], text: str
) -> list[Span] | None:
    """One render with every wanted content replaced; None when the template does more than strip the contents."""
    contents = [messages[i].get("content") for i in wanted]
    if not all(
        isinstance(c, str) and set(messages[i]) <= {"role", "content"} for i, c in zip(wanted, contents, strict=True)
    ):
        return None
    marks = _marks(messages, len(wanted))
    twin = list(messages)
    for index, mark in zip(wanted, marks, strict=True):
        twin[index] = {**messages[index], "content": mark}
    try:
        parts = _split(template.render(twin, tools), marks)
    except TemplateFailed:  # it looks into the content
        return None
    if parts is None:
        return None
    for shown in (str, str.strip, str.lstrip, str.rstrip):
        spans = _join(parts, [shown(c) for c in contents], text)
        if spans is not None:
            return spans
    return None


def _one(template: ChatTemplate, messages: list, tools: list | None, index: int, text: str) -> Span:
    """One message alone: its body is what the real render has between the head and the tail of a marked one."""
    message = messages[index]
    mark = _marks(messages, 1)[0]
    bare = {k: v for k, v in message.items() if k not in ("tool_calls", *REASONING)}
    bare["content"] = _like(message.get("content"), mark)
    head, tail = _around(template, messages, tools, index, bare, mark)
    start = len(head) if head is not None and text.startswith(head) else None
    end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    if (
        start is None
    ):  # the header depends on the content (a thinking block): all after the generation prompt is its own
        start = _after_prompt(template, messages, tools, index, text, head)
    if end is None and isinstance(message.get("content"), str):
        _, tail = _around(template, messages, tools, index, {**message, "content": message["content"] + mark}, mark)
        end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    if start is None or end is None or start > end:
        raise TemplateFailed(
            f"the chat template does not show message {index + 1} ({message['role']}) where it can be told from the "
            "rest, so it cannot be trained: mark it `train: false`, or give another template (chat_template_jinja)"
        )
    return start, end


def _around(template: ChatTemplate, messages: list, tools: list | None, index: int, twin: dict, mark: str) -> tuple:
    """What a render has before and after the one mark in message `index`; (None, None) when it is not there once."""
    try:
        parts = _split(template.render([*messages[:index], twin, *messages[index + 1 :]], tools), [mark])
    except TemplateFailed:
        return None, None
    return (None, None) if parts is None else tuple(parts)


def _after_prompt(
    template: ChatTemplate, messages: list, tools: list | None, index: int, text: str, head: str | None
) -> int | None:
    """The end of the generation prompt of message `index`, where the render goes on from it."""
    if messages[index]["role"] != "assistant" or index == 0:
        return None
    try:
        prompt = template.render(messages[:index], tools, add_generation_prompt=True)
        silent = template.render(messages[:index], tools)
    except TemplateFailed:
        return None
    header_is_blank = head is not None and head.startswith(prompt) and not head[len(prompt) :].strip()
    if text.startswith(prompt) and (prompt != silent or header_is_blank):
        return len(prompt)
    return None


class EndMarks:
    """Finds the characters that close a turn, in the renders of one template.

    What closes a turn is known from the render of the conversation that stops with it: the next turn's header cannot
    be in there. A decision once taken for (role, next role, special token) holds for the template.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._closes: dict[tuple, bool] = {}

    def after(
        self, messages: list[dict], tools: list[dict] | None, index: int, body: Span, text: str, special: dict[int, int]
    ) -> int:
        """The end of the end mark of message `index` whose body is known; the body's end when it has none.

        `special`: where special tokens of the tokenised `text` start, and where they end.
        """
        at = body[1]
        follower = messages[index + 1]["role"] if index + 1 < len(messages) else None
        key = (messages[index]["role"], follower, text[at : special[at]]) if at in special else None
        if key not in self._closes:
            tail = self._closing(messages, tools, index, body, text)
            blank = len(tail) - len(tail.lstrip())
            end = special.get(at + blank, at + len(tail.rstrip()))
            end = end if end <= at + len(tail) else at
            if key is None:
                return end
            self._closes[key] = end > at
        return special[at] if self._closes[key] else at

    def _closing(self, messages: list[dict], tools: list | None, index: int, body: Span, text: str) -> str:
        """What follows the body both in this render and in the one where the conversation stops with the turn."""
        start, end = body
        rest = text[end:]
        if index + 1 < len(messages):
            try:
                stopped = self.template.render(messages[: index + 1], tools)
            except TemplateFailed:
                return ""
            if stopped.startswith(text[:end]):
                alone = stopped[end:]
            else:  # the template shows earlier turns differently once others follow
                alone = stopped.rpartition(text[start:end])[2] if start < end else ""
            rest = rest[: _common(rest, alone)]
        return rest


def overlapping(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """For tokens at character `offsets` [tokens, 2]: whether each holds a character of one of the `spans`."""
    starts, ends = offsets.reshape(-1, 2).T
    out = np.zeros(len(starts), bool)
    for first, last in (span for span in spans if span[0] < span[1]):
        out |= (starts < last) & (ends > first)
    return out & (starts < ends)  # a token that stands for no character (BOS) belongs to nobody


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = now.strftime
    return env


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: other tools' markers of what is trained. Shown as their inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # jinja2's own filter escapes HTML; published templates expect plain JSON
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)


def _plain(message: dict) -> dict:
    """Without empty keys, and with a reasoning under the names that templates read it by, as transformers does."""
    message = {k: v for k, v in message.items() if v is not None}
    thought = next((message[k] for k in REASONING if k in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _text_or_file(jinja: str) -> str:
    if "{" in jinja or "\n" in jinja:
        return jinja
    try:
        return Path(jinja).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"chat_template_jinja {jinja}: neither a template nor a file that can be read ({error})"
        ) from None


def _marks(messages: list[dict], count: int) -> list[str]:
    """Strings that no message contains, in private-use characters that templates neither strip nor change."""
    everything = json.dumps(messages, ensure_ascii=False, default=str)
    fence = "\ue000"
    while fence in everything:
        fence = chr(ord(fence) + 1)
    return [f"{fence}{i}{fence}" for i in range(count)]


def _like(content: object, mark: str) -> object:
    return [{"type": "text", "text": mark}] if isinstance(content, list) else mark


def _split(text: str, marks: list[str]) -> list[str] | None:
    """Text between the marks, when each is there once and in order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def _join(parts: list[str], contents: list[str], text: str) -> list[Span] | None:
    """Where the contents stand if `text` is exactly part, content, part, ...; None if it is not."""
    spans, at = [], 0
    for part, content in zip(parts, contents, strict=False):
        if not text.startswith(part, at) or not text.startswith(content, at + len(part)):
            return None
        at += len(part)
        spans.append((at, at + len(content)))
        at += len(content)
    return spans if text[at:] == parts[-1] else None


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
