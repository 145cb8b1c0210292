"""Prompts that a config writes, as `format: "[INST] {instruction} [/INST]"`, which is axolotl's user-defined type.

https://docs.axolotl.ai/docs/dataset-formats/inst_tune.html: the prompt is `system_format` with the system message, if
there is one, and then `format` with instruction and input, or without an input `no_input_format`. The answer follows.
"""

from string import Formatter

FIELDS = {"format": ("instruction", "input"), "no_input_format": ("instruction",), "system_format": ("system",)}


def check_format(key: str, text: str) -> str:
    """The format itself. ValueError unless all its fields, in braces, are plain names that it may have."""
    wanted = " and ".join(f"{{{name}}}" for name in FIELDS[key])
    try:
        fields = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{error}; wanted text with {wanted}; a brace of the text itself is written twice") from None
    for _, name, spec, conversion in fields:
        if name is not None and (name not in FIELDS[key] or spec or conversion):
            shown = "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise ValueError(f"has the field {shown}; wanted {wanted}, and a brace of the text itself written twice")
    return text


def prompt_of(form: str, without_input: str | None, system_form: str | None, texts: dict[str, str]) -> str:
    """The prompt of a record; `texts`: its instruction, input and system message, "" for none."""
    system, given = texts["system"], texts["input"]
    head = (system_form or "{system}").format(system=system) if system else ""
    turn = form if given or without_input is None else without_input
    return head + turn.format(instruction=texts["instruction"], input=given)
