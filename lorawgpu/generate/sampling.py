"""How the next token is chosen."""

from dataclasses import dataclass, fields
from numbers import Integral, Real

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

TINY = 1e-6  # scores are divided by no less: far smaller divisors leave float32
KINDS = {int: "whole number", float: "number"}


def is_number(value: object) -> bool:
    """A number of Python or NumPy; to Python true and false are numbers too, to a user they are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """Applied in this order: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 is greedy.

    repetition_penalty: the scores of tokens that the prompt or the answer already holds are divided by it where
    positive and multiplied where negative (1: off). top_k: keep so many (0: all). top_p: keep the most likely tokens
    that together have this probability (1: all). min_p: keep those at least so likely as the likeliest times min_p
    (0: all). Sequence number i draws from stream i of `seed`, so a text depends on neither batch nor device order.
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
        """Itself. UserError for a value that is no number, or outside its range."""
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
