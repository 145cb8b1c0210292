"""What a user says about a model because its files do not: `overrides_of_model_config` and --model-option."""

from collections.abc import Sequence

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.weights.i2_s import LAYOUTS

ModelOptions = dict[str, str]
HIDDEN_ACT, I2_S_LAYOUT = "hidden_act", "i2_s_layout"
CHOICES = {HIDDEN_ACT: ("relu2", "silu"), I2_S_LAYOUT: tuple(LAYOUTS)}


def check_options(options: object) -> ModelOptions:
    """The options, none for None. ValueError for an unknown key or value, naming the choices."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ValueError("wanted a mapping, such as {hidden_act: relu2}")
    for key, value in options.items():
        if key not in CHOICES:
            raise ValueError(
                f"{brief(key)} is not supported; wanted {' or '.join(CHOICES)}. For other keys of config.json, change "
                "them in a copy of the model's folder"
            )
        if value not in CHOICES[key]:
            raise ValueError(f"{key} is {brief(value)}; wanted {wanted(key)}")
    return options


def parse_options(texts: Sequence[str]) -> ModelOptions:
    """The values of --model-option, KEY=VALUE each. UserError if one is unknown, or is given twice."""
    options: ModelOptions = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--model-option {text}: wanted KEY=VALUE, such as hidden_act=relu2")
        if options.get(key, value) != value:
            raise UserError(f"--model-option {text}: {key} is also set to {options[key]}")
        try:
            options |= check_options({key: value})
        except ValueError as error:
            raise UserError(f"--model-option {text}: {error}") from None
    return options


def wanted(key: str) -> str:
    *others, last = CHOICES[key]
    return f"{', '.join(others)} or {last}"


def how_to_say(key: str) -> str:
    """How to give an option, with its choices."""
    return (
        f"say it with --model-option {key}=VALUE, in a config with overrides_of_model_config: {{{key}: VALUE}}; "
        f"VALUE: {wanted(key)}"
    )
