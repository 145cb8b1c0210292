"""Rebuilding a `tokenizers` backend from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

`tokenizer.ggml.pre` names the pre-tokenizer. The wrong one changes ids without any error, so unknown names are
rejected. The patterns are those of the models' own tokenizer.json.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # SentencePiece's visible space

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Each pattern splits the pieces of the one before it, into its matches and the text between them.
SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],  # llama.cpp's, for files without `pre`
}
ALIASES = {
    "phi-2": "gpt-2", "olmo": "gpt-2", "mpt": "gpt-2", "starcoder": "smollm", "refact": "smollm",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "stablelm2": "qwen2",
}  # fmt: skip
SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@contextmanager
def user_errors(source: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises for a bad file into a UserError; a Rust panic is not an Exception."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{source}: not a valid tokenizer: {brief(str(error))}.") from None


def bos_eos_processor(
    backend: tokenizers.Tokenizer, bos: str | None, eos: str | None, source: str
) -> processors.TemplateProcessing:
    """A post-processor that adds these BOS and EOS tokens, if any."""
    ends = [token for token in (bos, eos) if token]
    ids = {token: backend.token_to_id(token) for token in ends}
    for token, token_id in ids.items():
        if token_id is None:
            raise UserError(f"{source}: special token {brief(token)} is not in the vocabulary.")
    before, after = ([bos] if bos else []), ([eos] if eos else [])
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=list(ids.items()))


def backend_from_gguf(file: "GgufFile") -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend and its special tokens by name. UserError, naming the key, if one is missing or not supported."""
    source = str(file.path)
    tokens = _strings(file, "tokens")
    types = _numbers(file, "token_type", len(tokens), np.full(len(tokens), NORMAL))
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{source}: tokenizer.ggml.model {brief(kind)} is not supported; wanted gpt2 or llama.")
    named = _named_tokens(file, tokens)
    with user_errors(source):
        if kind == "gpt2":
            backend, add_bos = _byte_level(file, tokens)
        else:
            backend, add_bos = _sentencepiece(file, tokens, types, named.get("unk_token")), True
        backend.add_special_tokens(_added(tokens, np.isin(types, (UNKNOWN, CONTROL)), special=True))
        backend.add_tokens(_added(tokens, types == USER_DEFINED, special=False))
        bos = named.get("bos_token") if _flag(file, "add_bos_token", add_bos) else None
        eos = named.get("eos_token") if _flag(file, "add_eos_token", False) else None
        backend.post_processor = bos_eos_processor(backend, bos, eos, source)
    return backend, named


def _added(tokens: list[str], chosen: np.ndarray, special: bool) -> list[AddedToken]:
    """The chosen tokens as added tokens, which are matched before anything else; their ids stay the same."""
    return [AddedToken(tokens[i], special=special, normalized=False) for i in np.flatnonzero(chosen)]


def _byte_level(file: "GgufFile", tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's BPE over bytes, and whether this family adds BOS by default."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    name = ALIASES.get(pre, pre) if isinstance(pre, str) else pre
    if not isinstance(name, str) or name not in SPLITS:
        known = ", ".join(sorted([*SPLITS, *ALIASES]))
        raise UserError(f"{file.path}: tokenizer.ggml.pre {brief(pre)} is not supported; wanted one of {known}.")
    merges = [_merge(file, merge) for merge in _strings(file, "merges")]
    llama3 = name == "llama-bpe"
    backend = tokenizers.Tokenizer(models.BPE(_vocabulary(file, tokens), merges, ignore_merges=llama3))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _merge(file: "GgufFile", merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if not 0 < cut < len(merge) - 1:
        raise UserError(f"{file.path}: merge {brief(merge)} in tokenizer.ggml.merges is not a pair of tokens.")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(file: "GgufFile", tokens: list[str], types: np.ndarray, unknown: str | None) -> tokenizers.Tokenizer:
    """SentencePiece's BPE with byte fallback: merges are derived from the scores, as transformers does it."""
    if file.metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UserError(f"{file.path}: tokenizer.ggml.remove_extra_whitespaces is not supported.")
    scores = _numbers(file, "scores", len(tokens), None)
    pieces = {token: float(scores[i]) for i, token in enumerate(tokens) if types[i] == NORMAL}
    vocabulary = _vocabulary(file, tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, _merges(pieces, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = _flag(file, "add_space_prefix", True)
    visible = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible]) if prefix else visible
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(pieces: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first (transformers' `generate_merges`)."""
    merges = []
    for piece, score in pieces.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(left, right) for left, right in pairs if left in pieces and right in pieces]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(left, right, score) for left, right in pairs]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _vocabulary(file: "GgufFile", tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise UserError(f"{file.path}: token {brief(twice)} appears twice in tokenizer.ggml.tokens.")
    return vocabulary


def _named_tokens(file: "GgufFile", tokens: list[str]) -> dict[str, str]:
    named = {}
    for name, key in SPECIAL_IDS.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise UserError(f"{file.path}: tokenizer.ggml.{key}_token_id {brief(token_id)} is outside the vocabulary.")
        named[name] = tokens[token_id]
    return named


def _strings(file: "GgufFile", key: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise UserError(f"{file.path}: metadata key tokenizer.ggml.{key} is missing or not a list of strings.")
    return value


def _numbers(file: "GgufFile", key: str, length: int, default: np.ndarray | None) -> np.ndarray:
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, np.ndarray) or value.shape != (length,) or not np.isfinite(value).all():
        raise UserError(f"{file.path}: metadata key tokenizer.ggml.{key} is not a list of {length} numbers.")
    return value


def _flag(file: "GgufFile", key: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise UserError(f"{file.path}: tokenizer.ggml.{key} is {brief(value)}; wanted true or false.")
    return value
