"""Loss masks: which characters of a rendered conversation belong to a turn, for any chat template.

No template is searched for known strings. The conversation is rendered as it is, and again with the content of a turn
replaced by a placeholder that occurs nowhere else. The text before and after the placeholder is the template's; what
the real render has between the two is the content. This is checked, not assumed: the real render must begin with the
one and end with the other. See `render_with_spans`.

What is trained of a turn:
- its content as the template shows it (stripped, with tool calls, ...), not the header before it;
- its end of turn: the special token that closes it, with the white space before that; or ordinary text, if the template
  closes turns with that. See `EndOfTurn`.

A token belongs to a turn if it contains any of these characters. So if the tokenizer merges the last character of the
header with the first of the content ("Assistant: Yes" -> ":" + " Yes"), that token is trained. If it leaves the space
of such a header alone ("Assistant: 7" -> ":" + " " + "7"), the space is trained too: the generation prompt ends before
it for the sake of the first kind, so the model has to write it for the second. See `spaces_before`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lorawgpu.chat.call_spans import call_span
from lorawgpu.chat.marks import placeholders, split_at, try_render
from lorawgpu.chat.spans import Span
from lorawgpu.chat.template import REASONING, ChatTemplate, TemplateFailed

MAX_LAYOUTS = 1000  # in the cache


@dataclass(frozen=True)
class TurnLayout:
    """What a template puts around the contents for a sequence of roles: `parts`, one more than there are contents, and
    which contents it strips."""

    parts: list[str]
    strips: list[bool]

    def fill(self, contents: list[str]) -> tuple[str, list[Span]]:
        """The text with `contents`, and the span of each one in it."""
        pieces, spans, at = [self.parts[0]], [], len(self.parts[0])
        for content, strip, part in zip(contents, self.strips, self.parts[1:], strict=True):
            content = content.strip() if strip else content
            spans.append((at, at + len(content)))
            pieces += content, part
            at += len(content) + len(part)
        return "".join(pieces), spans


def render_with_spans(
    template: ChatTemplate,
    messages: list[dict],
    tools: list[dict] | None,
    chosen: list[int],
    layouts: dict[tuple, TurnLayout | None] | None = None,
) -> tuple[str, list[Span]]:
    """The rendered conversation, and the spans of the contents of the `chosen` messages (indices).

    `layouts`: a cache of this template's layouts by roles, kept from call to call. With it a content-independent
    template rarely renders a conversation at all, and others usually once.

    TemplateFailed if the template does not show a chosen message, or shows it such that its content cannot be told
    from the rest.
    """
    layout = _layout(template, messages, tools, {} if layouts is None else layouts)
    filled, spans = (None, None) if layout is None else layout.fill([m["content"] for m in messages])
    text = filled if layout and template.content_independent else template.render(messages, tools)
    if text == filled:
        return text, [spans[i] for i in chosen]
    found = _spans_from_one_render(template, messages, tools, chosen, text)
    if found is None:
        found = [_span(template, messages, tools, index, text) for index in chosen]
    return text, found


def _layout(
    template: ChatTemplate, messages: list, tools: list | None, layouts: dict[tuple, TurnLayout | None]
) -> TurnLayout | None:
    """The layout for these roles; None if messages have more than a role and a string, or the template needs more."""
    if tools or not all(len(m) == 2 and isinstance(m.get("content"), str) for m in messages):
        return None
    roles = tuple([m["role"] for m in messages])
    if roles not in layouts:
        if len(layouts) == MAX_LAYOUTS:
            layouts.clear()
        layouts[roles] = _find_layout(template, roles)
    return layouts[roles]


def _find_layout(template: ChatTemplate, roles: tuple[str, ...]) -> TurnLayout | None:
    """From two renders of placeholders, one with spaces around each."""
    marks = placeholders([template.source], len(roles))
    turns = list(zip(roles, marks, strict=True))
    bare = try_render(template, [{"role": role, "content": mark} for role, mark in turns], None)
    spaced = try_render(template, [{"role": role, "content": f" {mark} "} for role, mark in turns], None)
    parts = None if bare is None else split_at(bare, marks)
    if parts is None or spaced is None:
        return None
    strips = [f" {mark} " not in spaced for mark in marks]
    layout = TurnLayout(parts, strips)
    return layout if layout.fill([f" {mark} " for mark in marks])[0] == spaced else None


def _spans_from_one_render(
    template: ChatTemplate, messages: list, tools: list | None, chosen: list[int], text: str
) -> list[Span] | None:
    """Replace all chosen contents at once; None if the template does more to them than strip."""
    contents = [messages[i].get("content") for i in chosen]
    if not all(
        isinstance(c, str) and set(messages[i]) <= {"role", "content"} for i, c in zip(chosen, contents, strict=True)
    ):
        return None
    marks = placeholders(messages, len(chosen))
    twin = list(messages)
    for index, mark in zip(chosen, marks, strict=True):
        twin[index] = {**messages[index], "content": mark}
    marked = try_render(template, twin, tools)  # None: it rejects the placeholder, so it inspects contents
    parts = None if marked is None else split_at(marked, marks)
    if parts is None:
        return None
    for shown in (str, str.strip, str.lstrip, str.rstrip):
        spans = _join(parts, [shown(c) for c in contents], text)
        if spans is not None:
            return spans
    return None


def _span(template: ChatTemplate, messages: list, tools: list | None, index: int, text: str) -> Span:
    """One message alone: its content is what the real render has between the head and tail of a marked one."""
    message, upto = messages[index], messages[: index + 1]
    head, start, end = _between(template, messages, tools, index, text)
    if start is None or end is None:  # a later turn may depend on this one, such as an answer to its tool call
        stopped = try_render(template, upto, tools)
        if stopped is not None and text.startswith(stopped):
            head, alone, closed = _between(template, upto, tools, index, stopped)
            start, end = (alone if start is None else start), (closed if end is None else end)
    if start is None:  # the header depends on the content (a thinking block): take all after the generation prompt
        start = _after_prompt(template, upto, tools, text, head)
    if (start is None or end is None) and message.get("tool_calls") and not message.get("content"):
        found = call_span(template, messages, tools, index, text)
        start, end = found or (start, end)
    if end is None and isinstance(message.get("content"), str):
        mark = placeholders(messages, 1)[0]
        _, tail = _around(template, messages, tools, index, {**message, "content": message["content"] + mark}, mark)
        end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    if start is None or end is None or start > end:
        thinks = any(key in message for key in REASONING) or "</think>" in str(message.get("content"))
        advice = (
            "remove its reasoning, or switch thinking on (chat_template_kwargs)" if thinks else "mark it `train: false`"
        )
        raise TemplateFailed(
            f"the chat template hides messages[{index}] ({message['role']}), or mixes it with other text, so it cannot "
            f"be trained; {advice}, or use another template (chat_template_jinja)"
        )
    return start, end


def _between(
    template: ChatTemplate, messages: list, tools: list | None, index: int, text: str
) -> tuple[str | None, int | None, int | None]:
    """The text before a placeholder for message `index`; and the start and end of the real content, where `text`
    begins and ends like the marked render."""
    mark = placeholders(messages, 1)[0]
    bare = {k: v for k, v in messages[index].items() if k not in ("tool_calls", *REASONING)}
    bare["content"] = _like(messages[index].get("content"), mark)
    head, tail = _around(template, messages, tools, index, bare, mark)
    start = len(head) if head is not None and text.startswith(head) else None
    end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    return head, start, end


def _around(template: ChatTemplate, messages: list, tools: list | None, index: int, twin: dict, mark: str) -> tuple:
    """What a render has before and after the mark in message `index`; (None, None) unless it is there exactly once."""
    marked = try_render(template, [*messages[:index], twin, *messages[index + 1 :]], tools)
    parts = None if marked is None else split_at(marked, [mark])
    return (None, None) if parts is None else tuple(parts)


def _after_prompt(template: ChatTemplate, upto: list, tools: list | None, text: str, head: str | None) -> int | None:
    """The end of the generation prompt for the last message of `upto`, if the render continues it."""
    if upto[-1]["role"] != "assistant" or len(upto) == 1:
        return None
    prompt = try_render(template, upto[:-1], tools, add_generation_prompt=True)
    without_prompt = try_render(template, upto[:-1], tools)
    if prompt is None or not text.startswith(prompt):
        return None
    # a template without a generation prompt will do, provided it puts no header before an answer
    headless = head is not None and head.startswith(prompt) and not head[len(prompt) :].strip()
    return len(prompt) if prompt != without_prompt or headless else None


class EndOfTurn:
    """Finds the characters that close a turn, in the renders of one template.

    They are found in the render of the conversation cut off after the turn, which cannot contain the next turn's
    header. The answer for (role, next role, special token) is cached: it holds for the whole template.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template
        self._closes: dict[tuple, bool] = {}

    def find(
        self,
        messages: list[dict],
        tools: list[dict] | None,
        index: int,
        content: Span,
        text: str,
        special: Callable[[int], int | None],
    ) -> int:
        """The end of the turn of message `index`, given its content's span; the content's end if nothing closes it.

        `special`: the end of the special token that starts at a character of the tokenized `text`, or None.
        """
        at = content[1]
        next_role = messages[index + 1]["role"] if index + 1 < len(messages) else None
        close = special(at)
        key = None if close is None else (messages[index]["role"], next_role, text[at:close])
        if key not in self._closes:
            tail = self._closing(messages, tools, index, content, text)
            blank = len(tail) - len(tail.lstrip())
            end = special(at + blank) or at + len(tail.rstrip())
            end = end if end <= at + len(tail) else at
            if key is None:
                return end
            self._closes[key] = end > at
        return close if self._closes[key] else at

    def _closing(self, messages: list[dict], tools: list | None, index: int, content: Span, text: str) -> str:
        """What follows the content both in this render and in that of the conversation cut off after the turn."""
        start, end = content
        rest = text[end:]
        if index + 1 < len(messages):
            stopped = try_render(self.template, messages[: index + 1], tools)
            if stopped is None:
                return ""
            if stopped.startswith(text[:end]):
                alone = stopped[end:]
            else:  # the template shows a turn differently once others follow
                alone = stopped.rpartition(text[start:end])[2] if start < end else ""
            rest = rest[: _common_prefix(rest, alone)]
        return rest


def _like(content: object, mark: str) -> object:
    return [{"type": "text", "text": mark}] if isinstance(content, list) else mark


def _join(parts: list[str], contents: list[str], text: str) -> list[Span] | None:
    """The spans of the contents if `text` is exactly part, content, part, ...; else None."""
    spans, at = [], 0
    for part, content in zip(parts, contents, strict=False):
        if not text.startswith(part, at) or not text.startswith(content, at + len(part)):
            return None
        at += len(part)
        spans.append((at, at + len(content)))
        at += len(content)
    return spans if text[at:] == parts[-1] else None


def _common_prefix(a: str, b: str) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
