"""Does an answer start in training where it starts in generation? Reasoning switches can make a difference."""

import os.path

from lorawgpu.chat.template import PROBE, ChatTemplate, TemplateFailed

QUESTION = {"role": "user", "content": "?"}
MAX_SHOWN = 80  # characters of a difference


def prompt_note(template: ChatTemplate) -> str:
    """What to tell the user if the generation prompt differs from what training puts before an answer, or ""."""
    try:
        prompt = template.render([QUESTION], add_generation_prompt=True)
        before, found, _ = template.render([QUESTION, {"role": "assistant", "content": PROBE}]).partition(PROBE)
    except TemplateFailed:  # the data will tell
        return ""
    prompt, before = prompt.rstrip(" "), before.rstrip(" ")  # a space there belongs to the answer
    if not found or prompt == before:
        return ""
    same = len(os.path.commonprefix([prompt, before]))
    shown = [repr(text[same:][-MAX_SHOWN:]) for text in (before, prompt)]
    switches = sorted(name for name in template.variables if "think" in name)
    hint = f"; chat_template_kwargs can set {', '.join(switches)}" if switches else ""
    return (
        f"note: a last answer follows {shown[0]} in training, but {shown[1]} in generation; where the chat template "
        f"allows it, make both the same{hint}"
    )
