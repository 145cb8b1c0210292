"""Does an answer start in training where it starts in generation? Reasoning switches can make a difference."""

import os.path

from lorawgpu.chat.template import PROBE, ChatTemplate, TemplateFailed

QUESTION = {"role": "user", "content": "?"}
MAX_SHOWN = 80  # characters of a difference


def prompt_note(template: ChatTemplate) -> str:
    """What to tell the user if the generation prompt differs from what training puts before an answer, or ""."""
    prompt, before = _prompts(template)
    if prompt == before:
        return ""
    same = len(os.path.commonprefix([prompt, before]))
    shown = [repr(text[same:][-MAX_SHOWN:]) for text in (before, prompt)]
    switches = sorted(name for name in template.variables if "think" in name)
    cures = [f"set {', '.join(switches)} in chat_template_kwargs"] if switches else []
    if prompt.startswith(before):
        cures.append(f"begin the answers with {shown[1]}")
    cures.append("use a template that starts both in the same way (chat_template_jinja)")
    return (
        f"note: a last answer follows {shown[0]} in training, but {shown[1]} in generation, so the model is asked in a "
        f"way that it was not trained in: {', or '.join(cures)}"
    )


def differs(template: ChatTemplate) -> bool:
    """Whether an answer may start in training where generation does not start it: then each record has to tell."""
    prompt, before = _prompts(template)
    return prompt != before


def follows_prompt(
    template: ChatTemplate, messages: list[dict], tools: list[dict] | None, text: str, start: int
) -> bool:
    """Whether the rendered `text` of a conversation has the generation prompt right before what is trained of its last
    message, from character `start` on, or around its beginning."""
    try:
        prompt = template.render(messages[:-1], tools, True).rstrip(" ")
    except TemplateFailed:
        return True
    return text.startswith(prompt) and not text[len(prompt) : start].strip()


def _prompts(template: ChatTemplate) -> tuple[str, str]:
    """The generation prompt, and what training puts before an answer to the same question; equal if it is unknown."""
    try:
        prompt = template.render([QUESTION], add_generation_prompt=True)
        before, found, _ = template.render([QUESTION, {"role": "assistant", "content": PROBE}]).partition(PROBE)
    except TemplateFailed:  # the data will tell
        return "", ""
    return (prompt.rstrip(" "), before.rstrip(" ")) if found else ("", "")  # a space there belongs to the answer
