"""Checked reading of the `tokenizer.ggml.*` metadata of a GGUF file."""

from typing import TYPE_CHECKING

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of tokenizer.ggml.token_type
SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_IDS = ("bos", "eos", "eot", "eom")
# Tokens that llama.cpp makes control tokens whatever the file says (src/llama-vocab.cpp).
END_MARKS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
}  # fmt: skip


def architecture_of(file: "GgufFile") -> str:
    """`general.architecture`, or "" if there is none: a file may hold a tokenizer alone."""
    return str(file.metadata.get("general.architecture", ""))


def named_tokens(file: "GgufFile", tokens: list[str]) -> dict[str, str]:
    """The special tokens by the names that templates use."""
    named = {}
    for name, key in SPECIAL_IDS.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise UserError(f"{file.path}: tokenizer.ggml.{key}_token_id {brief(token_id)} is outside the vocabulary.")
        named[name] = tokens[token_id]
    return named


def ends_turn(file: "GgufFile", tokens: list[str]) -> np.ndarray:
    """Bool [tokens]: whether it begins a text or ends one, or a turn, by its id in the metadata or by its name."""
    ids = {file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in END_IDS}
    return np.array([i in ids or token in END_MARKS for i, token in enumerate(tokens)], bool)


def vocabulary_of(file: "GgufFile", tokens: list[str]) -> dict[str, int]:
    """Ids by token. UserError if a token appears twice."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise UserError(f"{file.path}: token {brief(twice)} appears twice in tokenizer.ggml.tokens.")
    return vocabulary


def merges_of(file: "GgufFile") -> list[tuple[str, str]]:
    """The merges, best first. UserError if there are none, or one is not a pair of tokens."""
    return [_merge(file, merge) for merge in strings(file, "merges")]


def _merge(file: "GgufFile", merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if not 0 < cut < len(merge) - 1:
        raise UserError(f"{file.path}: merge {brief(merge)} in tokenizer.ggml.merges is not a pair of tokens.")
    return merge[:cut], merge[cut + 1 :]


def strings(file: "GgufFile", key: str) -> list[str]:
    """A list of strings under `tokenizer.ggml.`."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise UserError(f"{file.path}: metadata key tokenizer.ggml.{key} is missing or not a list of strings.")
    return value


def numbers(file: "GgufFile", key: str, length: int, default: np.ndarray | None) -> np.ndarray:
    """A list of `length` finite numbers under `tokenizer.ggml.`."""
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, np.ndarray) or value.shape != (length,) or not np.isfinite(value).all():
        raise UserError(f"{file.path}: metadata key tokenizer.ggml.{key} is not a list of {length} numbers.")
    return value


def flag(file: "GgufFile", key: str, default: bool) -> bool:
    """A boolean under `tokenizer.ggml.`."""
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise UserError(f"{file.path}: tokenizer.ggml.{key} is {brief(value)}; wanted true or false.")
    return value
