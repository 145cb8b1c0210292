"""The options of a learning-rate schedule (`lr_scheduler_kwargs`), checked against the schedule that they are for."""

from typing import Any

from pydantic import ValidationError, create_model

from lorawgpu.config.types import Count, NotNegative, Section
from lorawgpu.optim.schedule import options_of
from lorawgpu.util.suggest import nearest

_TYPES = {float: NotNegative, float | None: NotNegative | None, int: Count, int | None: Count | None}
_RATES = ("lr_end", "min_lr")  # options that are learning rates


def schedule_options(kind: str, given: dict[str, Any], peak: float) -> dict[str, Any]:
    """The options in `given`, with numbers in any spelling read. ValueError for an option that the schedule `kind` does
    not have, that has the wrong type, that is missing, or that is a rate above `peak`."""
    options = {name: o for name, o in options_of(kind).items() if not name.startswith("cosine_")}
    for name in given:
        if name not in options:
            meant = nearest(str(name), options)
            hint = f"the nearest one is {meant!r}" if meant else f"it has {', '.join(options) or 'none'}"
            raise ValueError(f"no option {name!r} in lr_scheduler_kwargs; {hint}")
    fields = {
        name: (_TYPES.get(o.annotation, o.annotation), ... if o.default is o.empty else o.default)
        for name, o in options.items()
    }
    try:
        checked = create_model(kind, __base__=Section, **fields).model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing":
            raise ValueError(f"wanted lr_scheduler_kwargs: {{{first['loc'][0]}: ...}}") from None
        raise ValueError(f"lr_scheduler_kwargs.{first['loc'][0]}: got {first['input']!r}; {first['msg']}") from None
    values = checked.model_dump(exclude_unset=True)
    for name in _RATES:
        if (values.get(name) or 0) > peak:
            raise ValueError(f"{name} {values[name]:g} is above learning_rate {peak:g}")
    return values
