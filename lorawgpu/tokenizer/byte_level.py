"""Byte-level BPE (`tokenizer.ggml.model` gpt2) from GGUF metadata.

`tokenizer.ggml.pre` names the pre-tokenizer. The wrong one changes ids without any error, so unknown names are
rejected. The patterns are those of the models' own tokenizer.json.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief
from lorawgpu.tokenizer.metadata import merges_of

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"  # a change from lower to upper case starts another word
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
GPT4O = rf"{WORD}{CONTRACTION}?|{CAPITALS}{CONTRACTION}?|\p{{N}}{{1,3}}|{SIGNS}"
TEKKEN = rf"{WORD}|{CAPITALS}|\p{{N}}|{SIGNS}"


@dataclass(frozen=True)
class PreTokenizer:
    """How the models with one `tokenizer.ggml.pre` read text.

    `splits`: each pattern splits the pieces of the one before it, into its matches and the text between them;
    `ignore_merges`: a piece that is a token stays one, whatever the merges say; `add_bos`: unless the file says
    otherwise; `nfc`: text is composed first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2)),
    "llama-bpe": PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((LLAMA3,)),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    # llama.cpp's, for files without `pre`
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
ALIASES = {
    "phi-2": "gpt-2", "olmo": "gpt-2", "mpt": "gpt-2", "starcoder": "smollm", "refact": "smollm",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "stablelm2": "qwen2", "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2", "llama4": "gpt-4o",
}  # fmt: skip


def byte_level(file: "GgufFile", vocabulary: dict[str, int]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's BPE over bytes, and whether these models add BOS by default. UserError for an unknown `pre`."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    known = PRE_TOKENIZERS.get(ALIASES.get(pre, pre)) if isinstance(pre, str) else None
    if known is None:
        wanted = ", ".join(sorted([*PRE_TOKENIZERS, *ALIASES]))
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre {brief(pre)} is not supported; wanted one of {wanted}. The model's "
            "Hugging Face folder has a tokenizer.json, which says by itself how it reads text: use that as base_model."
        )
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges_of(file), ignore_merges=known.ignore_merges))
    if known.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known.splits]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, known.add_bos
