"""Arguments of a chat template (`chat_template_kwargs`), such as Qwen3's `enable_thinking`.

They become part of the template's source, as defaults of its variables. So whatever keeps or renders the template
(the token cache, a checkpoint, an export, another engine) uses the switches of the training run.
"""

import json
import math

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # what every render sets
Arguments = dict[str, str | bool | int | float]


def check_arguments(arguments: Arguments) -> Arguments:
    """The same arguments. ValueError for a name that is not a variable's, or a value that is not a scalar."""
    if not isinstance(arguments, dict):
        raise ValueError("wanted names and values, such as {enable_thinking: false}")
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
            raise ValueError(f"{name!r} is not the name of a variable")
        if name in RESERVED:
            raise ValueError(f"{name} is set by the program in every render")
        if not isinstance(value, str | bool | int | float) or isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"wanted a string, a number, true or false for {name}")
    return arguments


def with_arguments(source: str, arguments: Arguments) -> str:
    """The template with defaults for its variables, in a line that renders to nothing."""
    return "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    ) + source  # fmt: skip
