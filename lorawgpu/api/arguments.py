"""Checks the arguments of the Python API before anything is computed: a mistake is one UserError, as in commands."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from lorawgpu.data.formats import to_example
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.generate.sampling import Sampling, is_whole
from lorawgpu.util.suggest import nearest


def sampling_of(sampling: Sampling | None, settings: dict) -> Sampling:
    """`sampling` (default: greedy) with `settings` replaced. Raises UserError for an unknown setting or bad value."""
    names = [field.name for field in fields(Sampling)]
    for name in settings:
        if name not in names:
            meant = nearest(name, names)
            hint = f"; the nearest one is {meant!r}" if meant else f"; wanted one of {', '.join(names)}"
            raise UserError(f"unknown setting {name!r}{hint}")
    if not isinstance(sampling, Sampling | None):
        raise UserError(f"sampling is {brief(sampling)}; wanted a lorawgpu.Sampling, or its settings by name")
    return replace(sampling or Sampling(), **settings).check()


def whole_number(name: str, value: object) -> int:
    """`value` as an int of at least 1. Raises UserError, with its name, for anything else."""
    if not is_whole(value) or value < 1:
        raise UserError(f"{name} is {brief(value)}; wanted a whole number of at least 1")
    return int(value)


def is_conversation(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def messages_of(prompt: object, raw: bool, place: tuple[str, int]) -> str | list[dict]:
    """A string unchanged, or the messages of a conversation, checked as those of a data set.

    Raises UserError, with `place`, for anything else, and for a conversation if `raw`.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise UserError(f"the prompt is {brief(prompt)}; wanted a string, a list of messages, or a list of these")
    if raw:
        raise UserError("raw=True continues plain text, but this prompt is a conversation")
    return to_example("chat", {"messages": prompt}, place).messages


def token_ids(ids: Sequence[int], vocab_size: int, context: int) -> np.ndarray:
    """`ids` as int32 [n], with n from 1 to `context`. Raises UserError if they are not valid token ids."""
    try:
        array = np.asarray(ids)
    except ValueError:  # rows of different lengths
        array = np.zeros((0, 0))
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise UserError(f"ids is {brief(ids)}; wanted a list of token ids, at least one")
    if len(array) > context:
        raise UserError(f"ids has {len(array)} tokens, the model's context is {context}: shorten it")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise UserError(f"ids contains {outside[0]}, which is outside the model's vocabulary of {vocab_size}")
    return array.astype(np.int32)


def records_of(records: object) -> list[dict]:
    """Records of a data set; a string is a text record. Raises UserError unless `records` is a non-empty list."""
    if isinstance(records, str | dict) or not hasattr(records, "__iter__"):
        raise UserError(f"records is {brief(records)}; wanted a list of strings or records of a data set")
    found = [{"text": r} if isinstance(r, str) else r for r in records]
    for number, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise UserError(f"records, line {number}: wanted a string or a record of a data set, got {brief(record)}")
    if not found:
        raise UserError("records is empty; wanted at least one string or record of a data set")
    return found
