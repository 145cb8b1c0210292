"""Small vocabularies of every kind, as a published tokenizer.json holds them and as the metadata of a GGUF file.

The pre-tokenizers, normalizers and decoders are those of the families' own tokenizer.json, spelled out.
"""

import json
from functools import cache

import gguf
import tokenizers
from nasty import CORPUS
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lorawgpu.files.gguf import GgufFile

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "[INST]", "<|endoftext|>", "<bos>", "<eos>",
           "<pad>", "<mask>"]  # fmt: skip
USER_DEFINED = ["<tool>", "<think>", "</think>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip


def split(pattern):
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), in_bytes])


def digits_apart():
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), own])


# `pre`: (pre-tokenizer, normalizer, ignore_merges)
BYTE_LEVEL = {
    "gpt-2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "smollm": (digits_apart, None, False),
    "refact": (digits_apart, None, False),  # Granite
    "llama-bpe": (lambda: split(LLAMA3), None, True),
    "dbrx": (lambda: split(LLAMA3), None, False),  # Phi-4, OLMo 2
    "smaug-bpe": (lambda: split(LLAMA3), None, False),  # SmolLM3
    "qwen2": (lambda: split(QWEN2), normalizers.NFC(), False),
    "qwen35": (lambda: split(QWEN35), normalizers.NFC(), False),
    "gpt-4o": (lambda: split(GPT4O), None, False),  # Phi-4-mini
    "tekken": (lambda: split(TEKKEN), None, True),  # Nemo, Ministral
}


@cache
def published_byte_level(pre):
    """A trained vocabulary, with two tokens that no merge reaches."""
    pre_tokenizer, normalizer, ignore_merges = BYTE_LEVEL[pre]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer()
    if normalizer:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    for token in ("ĠKelvin", "xyz"):
        model["vocab"][token] = len(model["vocab"])
    merges = [tuple(merge) for merge in model["merges"]]
    backend.model = models.BPE(model["vocab"], merges, ignore_merges=ignore_merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in USER_DEFINED])
    return backend


def tokens_of(backend):
    return [backend.id_to_token(i) for i in range(backend.get_vocab_size())]


def merges_of(backend):
    return [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]


def types_of(tokens):
    return [2 if t == "<unk>" else 3 if t in CONTROL else 4 if t in USER_DEFINED else 6 if t in BYTES else 1
            for t in tokens]  # fmt: skip


def byte_level_values(pre):
    """The metadata that llama.cpp's converter writes for `published_byte_level`."""
    tokens = tokens_of(published_byte_level(pre))
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types_of(tokens),
            "merges": merges_of(published_byte_level(pre)), "unknown_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 4}  # fmt: skip


@cache
def pieces():
    """Pieces of words and of spaces, best first, by training on words with their space before them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁+[^▁\n]*|\n+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    letters = [token for token in model["vocab"] if len(token) == 1 and token.isascii() or token == "▁"]
    runs = ["▁" * n for n in range(2, 9)]
    return [piece for piece in merged if piece not in runs and all(c in letters for c in piece)], letters, runs


def sentencepiece_values(**changes):
    """A vocabulary as SentencePiece trains it: control tokens, bytes, pieces by score, letters last."""
    merged, letters, _ = pieces()
    tokens = [*CONTROL, *USER_DEFINED, *BYTES, *merged, *letters]
    first = len(tokens) - len(merged) - len(letters)
    scores = [0.0] * first + [-float(i) for i in range(len(merged) + len(letters))]
    return {"model": "llama", "tokens": tokens, "token_type": types_of(tokens), "scores": scores,
            "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes  # fmt: skip


def gemma_values(**changes):
    """As Gemma 1 to 3: runs of newlines and of spaces are user-defined, the latter spelled with spaces."""
    merged, letters, runs = pieces()
    lines = ["\n" * n for n in range(2, 6)]
    spaces = [" " * len(run) for run in runs]
    merged = [piece for piece in merged if piece not in lines]
    tokens = [*CONTROL, *USER_DEFINED, *BYTES, *lines, *spaces, *merged, *letters]
    types = [4 if t in lines or t in spaces else kind for t, kind in zip(tokens, types_of(tokens), strict=True)]
    first = len(tokens) - len(merged) - len(letters)
    scores = [-1000.0] * first + [-float(i) for i in range(len(merged) + len(letters))]
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": False,
            "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes  # fmt: skip


def gemma4_values(**changes):
    """As Gemma 4: merges in the file, runs of spaces and of newlines among the ordinary tokens."""
    merged, letters, runs = pieces()
    lines = ["\n" * n for n in range(2, 6)]
    merged = [piece for piece in merged if piece not in lines]
    tokens = [*CONTROL, *USER_DEFINED, *BYTES, *lines, *runs, *merged, *letters]
    known = set(tokens)
    merges = [f"{token[:cut]} {token[cut:]}" for token in [*lines, *runs, *merged] for cut in range(1, len(token))
              if token[:cut] in known and token[cut:] in known]  # fmt: skip
    return {"model": "gemma4", "tokens": tokens, "token_type": types_of(tokens), "merges": merges,
            "scores": [-1000.0] * len(tokens), "add_space_prefix": False, "unknown_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2} | changes  # fmt: skip


def published_sentencepiece(values, merges, prefix, gemma=False, added=()):
    """A tokenizer.json for the vocabulary of `values`; `added`: user-defined tokens, runs of spaces left out."""
    vocabulary = {("▁" * len(t) if t and not t.strip(" ") else t): i for i, t in enumerate(values["tokens"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    visible = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), visible]) if prefix else visible
    if gemma:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in [*USER_DEFINED, *added]])
    return backend


def write_gguf(path, arch="llama", **values):
    """A GGUF file with only metadata: values by key under `tokenizer.ggml.`, None omits one."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        key = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        add = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
        if value is not None:
            add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)
