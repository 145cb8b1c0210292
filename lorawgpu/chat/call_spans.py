"""The characters of a turn that is nothing but tool calls, also where only such a turn may stand (Mistral's templates).

No placeholder can take the place of its content: the template may then reject the conversation, or write another
header. So the turn begins after what a generation prompt adds to the turn before it, and it ends before what closes a
turn of plain text.
"""

from lorawgpu.chat.marks import placeholders, split_at, try_render
from lorawgpu.chat.spans import Span
from lorawgpu.chat.template import ChatTemplate


def call_span(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None, index: int, text: str
) -> Span | None:
    """The span of message `index` in the rendered `text`, without what closes the turn; None if it cannot be told."""
    upto = messages[: index + 1]
    stopped = try_render(template, upto, tools)
    start = _start(template, messages, tools, index, text)
    alone = None if stopped is None else _start(template, upto, tools, index, stopped)
    if start is None or alone is None:
        return None
    turn = stopped[alone:]
    closing = _closing(template, upto, tools)
    calls = turn.removesuffix(closing) if closing else turn.rstrip()
    return (start, start + len(calls)) if calls and text.startswith(calls, start) else None


def _start(template: ChatTemplate, messages: list[dict], tools: list[dict] | None, index: int, text: str) -> int | None:
    """Where message `index` begins: after the content of the message before it, and what a prompt puts after that."""
    before = messages[index - 1].get("content") if index else None
    if not isinstance(before, str):
        return None
    (mark,) = placeholders(messages, 1)
    for content in (before + mark, before.rstrip() + mark):
        marked = [*messages]
        marked[index - 1] = {**messages[index - 1], "content": content}
        whole = _split(template, marked, tools, mark)
        prompt = _split(template, marked[:index], tools, mark, add_generation_prompt=True)
        if whole and prompt and text.startswith(whole[0]) and text.startswith(prompt[1], len(whole[0])):
            return len(whole[0]) + len(prompt[1])
    return None


def _closing(template: ChatTemplate, upto: list[dict], tools: list[dict] | None) -> str:
    """What a template puts after the content of a last turn of plain text."""
    (mark,) = placeholders(upto, 1)
    parts = _split(template, [*upto[:-1], {"role": upto[-1]["role"], "content": mark}], tools, mark)
    return parts[1] if parts else ""


def _split(
    template: ChatTemplate,
    messages: list[dict],
    tools: list[dict] | None,
    mark: str,
    add_generation_prompt: bool = False,
) -> list[str] | None:
    text = try_render(template, messages, tools, add_generation_prompt)
    return None if text is None else split_at(text, [mark])
