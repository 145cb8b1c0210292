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

import numpy as np
from tokenizers import Encoding

from lorawgpu.data.chat import REASONING, ChatTemplate, TemplateFailed

Span = tuple[int, int]  # characters start..end of a render, end exclusive
KNOWN = 1000  # rows of roles whose render is remembered


def bodies(
    template: ChatTemplate,
    messages: list[dict],
    tools: list[dict] | None,
    wanted: list[int],
    known: dict[tuple, list[str] | None] | None = None,
) -> tuple[str, list[Span]]:
    """The render of a conversation, and where in it the bodies of the `wanted` messages (indices) are.

    `known`: what this template was seen to put around the contents of a row of roles, kept from call to call so that
    most conversations are rendered once.

    TemplateFailed when the template does not show a wanted message, or shows it in a way that cannot be separated
    from what is not the message's own.
    """
    text = template.render(messages, tools)
    found = _as_before(template, messages, tools, text, {} if known is None else known)
    if found is not None:
        return text, [found[i] for i in wanted]
    found = _all_at_once(template, messages, tools, wanted, text)
    if found is None:
        found = [_one(template, messages, tools, index, text) for index in wanted]
    return text, found


def _as_before(
    template: ChatTemplate, messages: list, tools: list | None, text: str, known: dict[tuple, list[str] | None]
) -> list[Span] | None:
    """The bodies of all messages, where the render is their contents between what the template put around others of
    the same roles: no more has to be rendered to know where they are."""
    if tools or not all(len(m) == 2 and isinstance(m.get("content"), str) for m in messages):
        return None
    roles = tuple(m["role"] for m in messages)
    if roles not in known:
        if len(known) == KNOWN:
            known.clear()
        marks = _marks([], len(roles))
        twin = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        marked = _try(template, twin, tools)
        known[roles] = None if marked is None else _split(marked, marks)
    return _shown(known[roles], [m["content"] for m in messages], text)


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
    return _shown(None if marked is None else _split(marked, marks), contents, text)


def _shown(parts: list[str] | None, contents: list[str], text: str) -> list[Span] | None:
    """Where the contents are in `text`, as they are or stripped, if it has `parts` around them and nothing else."""
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
            f"the chat template does not show message {index + 1} ({message['role']}) where it can be told from the "
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


def tokens_of(encoding: Encoding, span: Span) -> Span:
    """The first and, exclusive, the last token that hold a character of `span`. Asks for a few tokens alone: taking the
    offsets of all out of the library costs as much as a third of tokenising."""
    start, end = span
    inside = (encoding.char_to_token(c) for c in range(start, end))
    first = next((token for token in inside if token is not None), None)
    if first is None:  # empty, or nothing that the tokenizer keeps
        return 0, 0
    backwards = (encoding.char_to_token(c) for c in range(end - 1, start - 1, -1))
    last = next(token for token in backwards if token is not None) + 1
    while last < len(encoding) and _covers(encoding, last, end - 1):  # the other bytes of one character
        last += 1
    return first, last


def blanks_before(text: str, encoding: Encoding, start: int) -> Span:
    """The tokens that are nothing but blanks right before `start` (the first character of a body), as a range."""
    blank = start
    while text[blank - 1 : blank] == " ":
        blank -= 1
    first, last = tokens_of(encoding, (blank, start))
    while first < last and encoding.token_to_chars(last - 1)[1] > start:
        last -= 1
    while first < last and encoding.token_to_chars(first)[0] < blank:
        first += 1
    return first, last


def special_at(encoding: Encoding, ids: list[int], special_ids: frozenset[int], start: int) -> int | None:
    """Where the special token ends that starts at character `start`; None when none does."""
    token = encoding.char_to_token(start)
    if token is None or ids[token] not in special_ids:
        return None
    first, end = encoding.token_to_chars(token)
    return end if first == start else None


def _covers(encoding: Encoding, token: int, char: int) -> bool:
    chars = encoding.token_to_chars(token)
    return chars is not None and chars[0] <= char < chars[1]


def overlapping(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """For tokens at character `offsets` [tokens, 2]: whether each holds a character of one of the `spans`."""
    starts, ends = offsets.reshape(-1, 2).T
    out = np.zeros(len(starts), bool)
    for first, last in (span for span in spans if span[0] < span[1]):
        out |= (starts < last) & (ends > first)
    return out & (starts < ends)  # a token that stands for no character (BOS) belongs to nobody


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
