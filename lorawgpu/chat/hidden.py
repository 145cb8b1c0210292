"""What a chat template leaves out of a conversation without a word: tools, reasoning, whole messages."""

import json

from lorawgpu.chat.template import REASONING, ChatTemplate, TemplateFailed

KINDS = ("tools", "reasoning", "messages")
CALLS = ("tool_calls", "function_call")
MARK = "\ue002\ue003\ue002"  # occurs in no conversation, and no filter changes it
PLAIN_ROLES = ("system", "user", "assistant")


def hidden_kinds(template: ChatTemplate, messages: list[dict], tools: list[dict] | None, text: str) -> frozenset[str]:
    """Those of `KINDS` of which the rendered `text` lacks something."""
    found = set()
    calls = any(key in message for message in messages for key in CALLS)
    if tools and _same(template, messages, None, text):
        found.add("tools")
    if calls and _same(template, [_without(m, CALLS) for m in messages], tools, text):
        found.add("tools")
    for index, message in enumerate(messages):
        reasoning = next((message[key] for key in REASONING if message.get(key)), "")
        if isinstance(reasoning, str) and not _in(reasoning, text):
            found.add("reasoning")
        for part, kind in _parts(message):
            if not _in(part, text) and not _spelled_otherwise(template, messages, tools, index, part):
                found.add(kind)
    plain = [message for message in messages if message["role"] in PLAIN_ROLES]
    if len(plain) < len(messages) and _same(template, plain, tools, text):
        found.add("messages")
    return frozenset(found)


def _parts(message: dict) -> list[tuple[str, str]]:
    """The texts of a message that a template may show apart, and the kind of each."""
    if "instruction" in message:
        return [(message["instruction"], "messages"), (message["input"], "messages")]
    thought, found, answer = (message.get("content") or "").rpartition("</think>")
    thought = thought.rpartition("<think>")[2]
    return [(thought, "reasoning"), (answer, "messages")] if found else [(answer, "messages")]


def _in(part: str, text: str) -> bool:
    part = part.strip()
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _without(message: dict, keys: tuple[str, ...]) -> dict:
    kept = {key: value for key, value in message.items() if key not in keys}
    return {**kept, "content": kept.get("content") or ""}


def _same(template: ChatTemplate, messages: list[dict], tools: list[dict] | None, text: str) -> bool:
    try:
        return template.render(messages, tools) == text
    except TemplateFailed:
        return False


def _spelled_otherwise(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None, index: int, part: str
) -> bool:
    """Whether another text in the place of `part` of message `index` is shown: the template changes this one."""
    twin = [*messages]
    twin[index] = {**messages[index], "content": messages[index]["content"].replace(part, MARK)}
    try:
        return MARK in template.render(twin, tools)
    except TemplateFailed:  # it looks into the content
        return True
