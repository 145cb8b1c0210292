"""Rebuilding a `tokenizers` backend from GGUF metadata: `tokenizer.ggml.model` gpt2, llama or gemma4."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import AddedToken, processors

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.tokenizer.byte_level import byte_level
from lorawgpu.tokenizer.metadata import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    architecture_of,
    ends_turn,
    flag,
    named_tokens,
    numbers,
    strings,
    vocabulary_of,
)
from lorawgpu.tokenizer.sentencepiece import gemma4, is_gemma, respell_spaces, sentencepiece

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

# Phi-3's other control tokens take the white space after them with them, as its tokenizer.json says.
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@contextmanager
def user_errors(source: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises for a bad file into a UserError; a Rust panic is not an Exception."""
    try:
        yield
    except (UserError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{source}: not a valid tokenizer: {brief(str(error))}.") from None


def bos_eos_processor(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """A post-processor that adds these BOS and EOS tokens of the vocabulary, if any."""
    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token}
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=list(ids.items()))


def backend_from_gguf(file: "GgufFile") -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend and its special tokens by name. UserError, naming the key, if one is missing or not supported."""
    source = str(file.path)
    tokens = strings(file, "tokens")
    types = numbers(file, "token_type", len(tokens), np.full(len(tokens), NORMAL))
    types = np.where(ends_turn(file, tokens) & (types == NORMAL), CONTROL, types)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UserError(
            f"{source}: tokenizer.ggml.model {brief(kind)} is not supported; wanted gpt2, llama or gemma4. Use the "
            "model's Hugging Face folder with its tokenizer.json as base_model."
        )
    if is_gemma(file):
        tokens, types = respell_spaces(tokens, types)
    named, vocabulary = named_tokens(file, tokens), vocabulary_of(file, tokens)
    with user_errors(source):
        if kind == "gpt2":
            backend, add_bos = byte_level(file, vocabulary)
        elif kind == "llama":
            backend, add_bos = sentencepiece(file, vocabulary, types, named.get("unk_token")), True
        else:
            backend, add_bos = gemma4(file, vocabulary, named.get("unk_token")), True
        _add_tokens(backend, tokens, types, strip_after=kind == "llama" and architecture_of(file) == "phi3")
        # No Gemma works without BOS, but some files of Gemma 4 say false.
        add_bos = is_gemma(file) or flag(file, "add_bos_token", add_bos)
        bos = named.get("bos_token") if add_bos else None
        eos = named.get("eos_token") if flag(file, "add_eos_token", False) else None
        backend.post_processor = bos_eos_processor(backend, bos, eos)
    return backend, named


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: np.ndarray, strip_after: bool) -> None:
    """Control and user-defined tokens, which are matched before anything else; their ids stay the same."""
    special = [
        AddedToken(tokens[i], special=True, normalized=False, rstrip=strip_after and tokens[i] not in PHI3_KEEPS_SPACE)
        for i in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL)))
    ]
    backend.add_special_tokens(special)
    plain = [tokens[i] for i in np.flatnonzero(types == USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
