"""SentencePiece's BPE with byte fallback (`tokenizer.ggml.model` llama, and Gemma 4's gemma4) from GGUF metadata.

Text is not cut into words: spaces become U+2581, and merges run over whole segments between special tokens.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from lorawgpu.errors import UserError
from lorawgpu.tokenizer.metadata import NORMAL, architecture_of, flag, merges_of, numbers

if TYPE_CHECKING:
    from lorawgpu.files.gguf import GgufFile

SPACE = "▁"  # SentencePiece's visible space
MAX_MERGES = 16  # for each token; published models have two or three


def is_gemma(file: "GgufFile") -> bool:
    """Whether the file is of one of the Gemmas, which spell runs of spaces in their own way and always want BOS."""
    return architecture_of(file).startswith("gemma") or file.metadata.get("tokenizer.ggml.model") == "gemma4"


def respell_spaces(tokens: list[str], types: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Gemma's runs of spaces, which files store as spaces of user-defined tokens, as the pieces that merges form."""
    runs = [len(token) > 1 and not token.strip(" ") for token in tokens]
    respelled = [SPACE * len(token) if run else token for token, run in zip(tokens, runs, strict=True)]
    return respelled, np.where(runs, NORMAL, types)


def sentencepiece(
    file: "GgufFile", vocabulary: dict[str, int], types: np.ndarray, unknown: str | None
) -> tokenizers.Tokenizer:
    """The backend of a file whose `tokenizer.ggml.model` is llama. UserError if a key is missing or not supported."""
    if file.metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise UserError(
            f"{file.path}: tokenizer.ggml.remove_extra_whitespaces is not supported: use the model's Hugging Face "
            "folder, whose tokenizer.json says by itself how it reads text."
        )
    merges = merges_of(file) if "tokenizer.ggml.merges" in file.metadata else _merges(file, vocabulary, types)
    return _backend(vocabulary, merges, unknown, flag(file, "add_space_prefix", not is_gemma(file)))


def gemma4(file: "GgufFile", vocabulary: dict[str, int], unknown: str | None) -> tokenizers.Tokenizer:
    """Gemma 4's BPE: merges from the file, no prefix, and lines and runs of newlines apart."""
    backend = _backend(vocabulary, merges_of(file), unknown, flag(file, "add_space_prefix", False))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    runs = [token for token in vocabulary if token and not token.strip("\n")]
    if any(backend.encode(run, add_special_tokens=False).ids != [vocabulary[run]] for run in runs):
        # Merges do not reach all of them, so they are matched as a whole.
        backend.add_tokens([AddedToken(run, special=False, normalized=False) for run in runs])
    return backend


def _backend(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, prefix: bool
) -> tokenizers.Tokenizer:
    """`prefix`: a space goes before the text, and after each special token in it."""
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    visible = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible]) if prefix else visible
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(file: "GgufFile", vocabulary: dict[str, int], types: np.ndarray) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score first, as transformers derives them.

    Gemma's scores do not follow the order of its merges, but the order of its tokens does.
    """
    scores = numbers(file, "scores", len(vocabulary), None)
    scores = -np.arange(len(vocabulary)) if is_gemma(file) else scores
    pieces = {token: float(scores[i]) for token, i in vocabulary.items() if types[i] == NORMAL}
    lengths = sorted({len(piece) for piece in pieces})
    known, merges = set(lengths), []
    for piece, score in pieces.items():
        cuts = [cut for cut in lengths[: bisect_left(lengths, len(piece))] if len(piece) - cut in known]
        pairs = [(piece[:cut], piece[cut:]) for cut in cuts if piece[:cut] in pieces and piece[cut:] in pieces]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(left, right, score) for left, right in pairs]
        if len(merges) > MAX_MERGES * (len(pieces) + 1000):
            raise UserError(
                f"{file.path}: its {len(pieces):,} tokens are made of each other in more than {len(merges):,} ways; "
                "the file is damaged"
            )
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]
