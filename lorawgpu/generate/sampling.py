"""The settings for choosing the next token."""

from dataclasses import dataclass, fields
from numbers import Integral, Real

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

TINY = 1e-6  # the smallest divisor of scores: much smaller ones overflow float32
KINDS = {int: "whole number", float: "number"}


def is_number(value: object) -> bool:
    """Whether `value` is a Python or NumPy number. Python counts bool as one, a user does not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """Applied in this order: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 is greedy.

    repetition_penalty: scores of tokens that occur in the prompt or answer are divided by it if positive, multiplied if
    negative (1: off). top_k: keep the k most likely tokens (0: all). top_p: keep the most likely tokens that together
    have this probability (1: all). min_p: keep tokens at least min_p times as likely as the most likely one (0: all).
    Sequence i draws from stream i of `seed`, so an answer depends on neither batch nor device order.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check(self) -> "Sampling":
        """Returns itself. Raises UserError for a value that is not a number, or out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (is_whole(value) if field.type is int else is_number(value)):
                raise UserError(f"{field.name} is {brief(value)}; wanted a {KINDS[field.type]}")
        ranges = {
            "temperature": (self.greedy or TINY <= self.temperature <= 100, f"from {TINY:g} to 100, or 0 (greedy)"),
            "top_k": (0 <= self.top_k < 1 << 32, "from 0 (all tokens) to 2^32 - 1"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (TINY <= self.repetition_penalty <= 100, f"from {TINY:g} to 100; 1 is off"),
            "seed": (0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1"),
        }
        for name, (fits, wanted) in ranges.items():
            if not fits:
                raise UserError(f"{name} is {getattr(self, name)!r}; wanted a value {wanted}")
        return self
