"""Rendering conversations with placeholders in them: what a template puts where."""

import json

from lorawgpu.chat.template import ChatTemplate, TemplateFailed


def try_render(
    template: ChatTemplate, messages: list, tools: list | None, add_generation_prompt: bool = False
) -> str | None:
    """The render, or None if the template raises."""
    try:
        return template.render(messages, tools, add_generation_prompt)
    except TemplateFailed:
        return None


def placeholders(messages: list[dict], count: int) -> list[str]:
    """Strings that no message contains, in private-use characters that templates neither strip nor change."""
    everything = json.dumps(messages, ensure_ascii=False, default=str)
    fence = "\ue000"
    while fence in everything:
        fence = chr(ord(fence) + 1)
    return [f"{fence}{i}{fence}" for i in range(count)]


def split_at(text: str, marks: list[str]) -> list[str] | None:
    """The text between the marks, if each one occurs exactly once and in order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]
