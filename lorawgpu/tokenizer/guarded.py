"""A tokenizer that works in a worker process: what everything uses that reads a model of strangers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from lorawgpu import guard
from lorawgpu.errors import UserError
from lorawgpu.files.gguf import GgufFile
from lorawgpu.tokenizer.hf import Tokenizer

T = TypeVar("T")
FACTS = ("source", "special_tokens", "chat_template", "bos_id", "eos_id", "add_bos", "vocab_size", "special_ids",
         "added_ids", "tool_use_template")  # fmt: skip


class GuardedTokenizer(guard.Kept):
    """A `Tokenizer` with the same attributes and methods; sent to a worker, it arrives as the `Tokenizer` itself.

    `where`: the file or folder, for messages. All of them raise UserError if the library meets a limit or fails.
    """

    def __init__(self, where: str, build: Callable[..., Tokenizer], *args: object):
        super().__init__(build, *args)
        self.where = where
        vars(self).update(zip(FACTS, self.call(_facts), strict=True))

    @classmethod
    def from_hf_folder(cls, folder: Path, rows: int | None = None) -> "GuardedTokenizer":
        """As `Tokenizer.from_hf_folder`."""
        return cls(str(folder), Tokenizer.from_hf_folder, Path(folder), rows)

    @classmethod
    def from_gguf(cls, path: Path, rows: int | None = None) -> "GuardedTokenizer":
        """The tokenizer of a GGUF file, as `Tokenizer.from_gguf`."""
        return cls(str(path), _from_gguf, Path(path), rows)

    def with_special_tokens(self, tokens: dict[str, str]) -> "GuardedTokenizer":
        """As `Tokenizer.with_special_tokens`."""
        return GuardedTokenizer(self.where, Tokenizer.with_special_tokens, self, tokens) if tokens else self

    def with_added(
        self, tokens: Sequence[str], overrides: Mapping[int, str], rows: int | None = None
    ) -> "GuardedTokenizer":
        """As `Tokenizer.with_added`."""
        return GuardedTokenizer(self.where, Tokenizer.with_added, self, list(tokens), dict(overrides), rows)

    @cached_property
    def digest(self) -> str:
        return self.call(getattr, "digest")

    def to_json(self) -> str:
        return self.call(Tokenizer.to_json)

    def token_id(self, token: str) -> int | None:
        return self.call(Tokenizer.token_id, token)

    def token(self, token_id: int) -> str | None:
        return self.call(Tokenizer.token, token_id)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return self.call(Tokenizer.encode, text, add_special, parse_special)

    def document(self, text: str) -> list[int]:
        return self.call(Tokenizer.document, text)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.call(Tokenizer.decode, [int(i) for i in ids], skip_special)

    def call(self, function: Callable[..., T], *args: object) -> T:
        """`function(tokenizer, *args)`, computed where the tokenizer is."""
        try:
            return guard.call(function, self, *args)
        except guard.WorkerStopped as stopped:
            raise UserError(f"{self.where}: the tokenizer was stopped: {stopped}") from None


def _from_gguf(path: Path, rows: int | None) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(path), rows)


def _facts(tokenizer: Tokenizer) -> list:
    return [getattr(tokenizer, name) for name in FACTS]
