"""Masks: which characters of a rendered conversation an assistant wrote, for any template.

No template is searched for known strings. The conversation is rendered as it is, and once more with the content of a
turn replaced by a mark that occurs nowhere else: what stands before and after the mark is the template's, and what
the real render has between the same two is the turn's body. That is checked, not assumed: the real render must begin
with the one and end with the other. See `bodies`.

What is trained of a turn:
- its body: the content as the template shows it (stripped, with tool calls, ...), not the header before it;
- its end mark: the special token that closes the turn, with white space before it; where the template closes turns
  with ordinary text, that text. See `end_marks`.
A token belongs to a turn when it holds at least one of these characters: where the tokenizer merges the last
character of the header with the first of the content ("Assistant: Yes" -> ":" + " Yes"), the token is trained. Where it
does not merge the blank of such a header ("Assistant: 7" -> ":" + " " + "7"), the blank alone is trained as well: the
generation prompt leaves it out for the first kind, so the model must write it for the second. See `blanks_before`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from lorawgpu.chat.spans import Span
from lorawgpu.chat.template import REASONING, ChatTemplate, TemplateFailed

KNOWN = 1000  # rows of roles whose render is remembered


@dataclass(frozen=True)
class Frame:
    """What a template puts around the contents of a row of roles: `parts`, one more than there are contents; and which
    contents it strips."""

    parts: list[str]
    strips: list[bool]

    def fill(self, contents: list[str]) -> tuple[str, list[Span]]:
        """The text with `contents`, and where each is in it."""
        pieces, spans, at = [self.parts[0]], [], len(self.parts[0])
        for content, strip, part in zip(contents, self.strips, self.parts[1:], strict=True):
            content = content.strip() if strip else content
            spans.append((at, at + len(content)))
            pieces += content, part
            at += len(content) + len(part)
        return "".join(pieces), spans


def bodies(
    template: ChatTemplate,
    messages: list[dict],
    tools: list[dict] | None,
    wanted: list[int],
    frames: dict[tuple, Frame | None] | None = None,
) -> tuple[str, list[Span]]:
    """The render of a conversation, and where in it the bodies of the `wanted` messages (indices) are.

    `frames` of this template, by roles, are kept from call to call: few conversations have to be rendered at all for a
    template that looks at no content, and once for others.

    TemplateFailed when the template does not show a wanted message, or shows it in a way that cannot be separated
    from what is not the message's own.
    """
    frame = _frame(template, messages, tools, {} if frames is None else frames)
    filled, found = (None, None) if frame is None else frame.fill([m["content"] for m in messages])
    text = filled if frame and template.blind else template.render(messages, tools)
    if text == filled:
        return text, [found[i] for i in wanted]
    found = _all_at_once(template, messages, tools, wanted, text)
    if found is None:
        found = [_one(template, messages, tools, index, text) for index in wanted]
    return text, found


def _frame(
    template: ChatTemplate, messages: list, tools: list | None, frames: dict[tuple, Frame | None]
) -> Frame | None:
    """What the template puts around contents of these roles; None where there is more to a message, or to it."""
    if tools or not all(len(m) == 2 and isinstance(m.get("content"), str) for m in messages):
        return None
    roles = tuple([m["role"] for m in messages])
    if roles not in frames:
        if len(frames) == KNOWN:
            frames.clear()
        frames[roles] = _framed(template, roles)
    return frames[roles]


def _framed(template: ChatTemplate, roles: tuple[str, ...]) -> Frame | None:
    """Seen in two renders of marks, one with blanks around each."""
    marks = _marks([template.source], len(roles))
    turns = list(zip(roles, marks, strict=True))
    bare = _try(template, [{"role": role, "content": mark} for role, mark in turns], None)
    wide = _try(template, [{"role": role, "content": f" {mark} "} for role, mark in turns], None)
    parts = None if bare is None else _split(bare, marks)
    if parts is None or wide is None:
        return None
    strips = [f" {mark} " not in wide for mark in marks]
    frame = Frame(parts, strips)
    return frame if frame.fill([f" {mark} " for mark in marks])[0] == wide else None


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
    marked = _try(template, twin, tools)  # None: it looks into the content
    parts = None if marked is None else _split(marked, marks)
    if parts is None:
        return None
    for shown in (str, str.strip, str.lstrip, str.rstrip):
        spans = _join(parts, [shown(c) for c in contents], text)
        if spans is not None:
            return spans
    return None


def _one(template: ChatTemplate, messages: list, tools: list | None, index: int, text: str) -> Span:
    """One message alone: its body is what the real render has between the head and the tail of a marked one."""
    message, upto = messages[index], messages[: index + 1]
    head, start, end = _between(template, messages, tools, index, text)
    if start is None or end is None:  # a later turn may insist on this one as it is: an answer to a tool call
        stopped = _try(template, upto, tools)
        if stopped is not None and text.startswith(stopped):
            head, alone, closed = _between(template, upto, tools, index, stopped)
            start, end = (alone if start is None else start), (closed if end is None else end)
    if (
        start is None
    ):  # the header depends on the content (a thinking block): all after the generation prompt is its own
        start = _after_prompt(template, upto, tools, text, head)
    if end is None and isinstance(message.get("content"), str):
        mark = _marks(messages, 1)[0]
        _, tail = _around(template, messages, tools, index, {**message, "content": message["content"] + mark}, mark)
        end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    if start is None or end is None or start > end:
        raise TemplateFailed(
            f"the chat template does not show messages[{index}] ({message['role']}) where it can be told from the "
            "rest, so it cannot be trained: mark it `train: false`, or give another template (chat_template_jinja)"
        )
    return start, end


def _between(
    template: ChatTemplate, messages: list, tools: list | None, index: int, text: str
) -> tuple[str | None, int | None, int | None]:
    """What stands before a mark in place of message `index`, and the start and end of the real body where `text`
    begins and ends as the marked render does."""
    mark = _marks(messages, 1)[0]
    bare = {k: v for k, v in messages[index].items() if k not in ("tool_calls", *REASONING)}
    bare["content"] = _like(messages[index].get("content"), mark)
    head, tail = _around(template, messages, tools, index, bare, mark)
    start = len(head) if head is not None and text.startswith(head) else None
    end = len(text) - len(tail) if tail is not None and text.endswith(tail) else None
    return head, start, end


def _around(template: ChatTemplate, messages: list, tools: list | None, index: int, twin: dict, mark: str) -> tuple:
    """What a render has before and after the one mark in message `index`; (None, None) when it is not there once."""
    marked = _try(template, [*messages[:index], twin, *messages[index + 1 :]], tools)
    parts = None if marked is None else _split(marked, [mark])
    return (None, None) if parts is None else tuple(parts)


def _after_prompt(template: ChatTemplate, upto: list, tools: list | None, text: str, head: str | None) -> int | None:
    """The end of the generation prompt of the last message of `upto`, where the render goes on from it."""
    if upto[-1]["role"] != "assistant" or len(upto) == 1:
        return None
    prompt, silent = _try(template, upto[:-1], tools, add_generation_prompt=True), _try(template, upto[:-1], tools)
    if prompt is None or not text.startswith(prompt):
        return None
    # a template that knows no generation prompt will do if it puts no header before an answer either
    headless = head is not None and head.startswith(prompt) and not head[len(prompt) :].strip()
    return len(prompt) if prompt != silent or headless else None


def _try(template: ChatTemplate, messages: list, tools: list | None, add_generation_prompt: bool = False) -> str | None:
    """A render, or None when the template refuses."""
    try:
        return template.render(messages, tools, add_generation_prompt)
    except TemplateFailed:
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
        self,
        messages: list[dict],
        tools: list[dict] | None,
        index: int,
        body: Span,
        text: str,
        special: Callable[[int], int | None],
    ) -> int:
        """The end of the end mark of message `index` whose body is known; the body's end when it has none.

        `special`: where the special token ends that starts at a character of the tokenised `text`, if one does.
        """
        at = body[1]
        follower = messages[index + 1]["role"] if index + 1 < len(messages) else None
        close = special(at)
        key = None if close is None else (messages[index]["role"], follower, text[at:close])
        if key not in self._closes:
            tail = self._closing(messages, tools, index, body, text)
            blank = len(tail) - len(tail.lstrip())
            end = special(at + blank) or at + len(tail.rstrip())
            end = end if end <= at + len(tail) else at
            if key is None:
                return end
            self._closes[key] = end > at
        return close if self._closes[key] else at

    def _closing(self, messages: list[dict], tools: list | None, index: int, body: Span, text: str) -> str:
        """What follows the body both in this render and in the one where the conversation stops with the turn."""
        start, end = body
        rest = text[end:]
        if index + 1 < len(messages):
            stopped = _try(self.template, messages[: index + 1], tools)
            if stopped is None:
                return ""
            if stopped.startswith(text[:end]):
                alone = stopped[end:]
            else:  # the template shows earlier turns differently once others follow
                alone = stopped.rpartition(text[start:end])[2] if start < end else ""
            rest = rest[: _common(rest, alone)]
        return rest


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
