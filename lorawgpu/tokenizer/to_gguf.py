"""A tokenizer as `tokenizer.ggml.*` metadata: the inverse of `tokenizer.gguf`, which reads it back as a check.

GGUF has no pre-tokenizers and normalizers, only names of known ones, so the name is found by trial: it is the one with
which the probe texts become the same ids, as llama.cpp's converters do it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorawgpu import guard
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.byte_level import PRE_TOKENIZERS
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.tokenizer.metadata import BYTE, CONTROL, NORMAL, SPECIAL_IDS, UNKNOWN, UNUSED, USER_DEFINED
from lorawgpu.tokenizer.sentencepiece import SPACE

# Texts on which pre-tokenizers disagree: letters with marks, cases, numbers, runs of spaces and lines, signs, scripts.
PROBES = (
    "Hello, world! I'm HELLO'S O'Neil they'LL we've camelCaseWord XMLHttpRequest iPhone",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F ١٢٣ ½ Ⅷ 10km 2nd",
    "  two   three\ttab\n\nlines \r\n  end  \n \n\n\n x\u00a0y\u3000z   ",
    "def f(x): return x**2  # a/b\\c {}[]() <|im_end|> != === ->>> .../// ...\n//\n",
    "naïve café e\u0301 ǅ ﬁ ñ Å Å Straße ÇA ΑΒΓ абв ЩЪ",
    "日本語のテキスト、中文。한국어 ภาษาไทย हिन्दी ক্ষ தமிழ் العربية עברית",
    "😀👩‍👩‍👧🏽 ♥️ 𝔘𝔫𝔦 \u200b\u200d\ufeff €£¥ §¶",
)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
HUGE = -1e9  # a score that no merge has


@dataclass(frozen=True)
class _File:
    """What `tokenizer.gguf` reads of a file."""

    metadata: dict[str, Any]
    path: str


def tokenizer_metadata(tokenizer: Tokenizer, rows: int, arch: str) -> dict[str, Any]:
    """Whole metadata keys for a model of architecture `arch` with `rows` rows in its embedding.

    UserError if no tokenizer of GGUF gives the same ids.
    """
    with guard.loading():
        data = json.loads(tokenizer.to_json())
    model = data["model"]
    if model.get("type") != "BPE":
        raise UserError(f"{tokenizer.source}: a {model.get('type')} tokenizer cannot be written to a GGUF file")
    base = _named(tokenizer) | {"general.architecture": arch}
    candidates = _byte_level(tokenizer, data, rows) if _is_byte_level(data) else _sentencepiece(tokenizer, data, rows)
    for candidate in candidates:
        metadata = base | candidate
        if _same(tokenizer, metadata):
            return metadata
    raise UserError(
        f"{tokenizer.source}: no tokenizer that GGUF knows gives the same ids; convert the merged folder (--to merged) "
        "with llama.cpp's convert_hf_to_gguf.py, which may know this one"
    )


def _is_byte_level(data: dict) -> bool:
    return "ByteLevel" in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])


def _named(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {key: tokenizer.special_tokens.get(name) for name, key in SPECIAL_IDS.items()}
    found = {f"tokenizer.ggml.{key}_token_id": tokenizer.token_id(t) for key, t in ids.items() if t is not None}
    ends = tokenizer.encode("", add_special=True)
    found |= {
        "tokenizer.ggml.add_bos_token": tokenizer.add_bos,
        "tokenizer.ggml.add_eos_token": tokenizer.eos_id is not None and ends[-1:] == [tokenizer.eos_id] != ends[:1],
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    return {key: value for key, value in found.items() if value is not None}


def _tokens(tokenizer: Tokenizer, data: dict, rows: int) -> dict[str, Any]:
    """Spelling and type of every id. Rows of the embedding without a token get a name that no text has."""
    added = {token["id"]: token for token in data["added_tokens"]}
    unknown = tokenizer.special_tokens.get("unk_token")
    tokens, types = [], []
    for i in range(max(rows, tokenizer.vocab_size)):
        token = tokenizer.token(i)
        if token is None:
            tokens.append(f"[PAD{i}]")
            types.append(UNUSED)
            continue
        kind = NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
        tokens.append(token)
        types.append(UNKNOWN if token == unknown and kind == CONTROL else kind)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def _merges(data: dict) -> list[tuple[str, str]]:
    pairs = data["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in pairs]


def _byte_level(tokenizer: Tokenizer, data: dict, rows: int) -> Iterator[dict[str, Any]]:
    """The known pre-tokenizers, those with the same patterns first: probes may not reach what tells two apart."""
    common = _tokens(tokenizer, data, rows) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(data)],
    }
    steps = json.dumps(data.get("pre_tokenizer"))
    composes, ignores = "NFC" in json.dumps(data.get("normalizer")), bool(data["model"].get("ignore_merges"))
    known = {n: p for n, p in PRE_TOKENIZERS.items() if (p.nfc, p.ignore_merges) == (composes, ignores)}
    for name in sorted(known, key=lambda n: not all(json.dumps(split) in steps for split in known[n].splits)):
        yield common | {"tokenizer.ggml.pre": name}


def _sentencepiece(tokenizer: Tokenizer, data: dict, rows: int) -> Iterator[dict[str, Any]]:
    """A token's score is the rank of the best merge that makes it. Gemma 4 stores its merges instead."""
    common, merges = _tokens(tokenizer, data, rows), _merges(data)
    best: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        best.setdefault(left + right, -float(rank))
    tokens, types = common["tokenizer.ggml.tokens"], common["tokenizer.ggml.token_type"]
    kinds = [BYTE if kind == NORMAL and _BYTE.fullmatch(t) else kind for t, kind in zip(tokens, types, strict=True)]
    scores = {"tokenizer.ggml.scores": [best.get(token, HUGE) for token in tokens]}
    pieces = common | scores | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.token_type": kinds}
    runs = [len(token) > 1 and not token.strip(SPACE) for token in tokens]
    spelled = {  # as files of Gemma 1 to 3 have them
        "tokenizer.ggml.tokens": [" " * len(t) if run else t for t, run in zip(tokens, runs, strict=True)],
        "tokenizer.ggml.token_type": [USER_DEFINED if run else kind for kind, run in zip(kinds, runs, strict=True)],
    }
    for prefix in (False, True):
        yield pieces | spelled | {"tokenizer.ggml.add_space_prefix": prefix}
        yield pieces | {"tokenizer.ggml.add_space_prefix": prefix}
    gemma4 = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    yield pieces | gemma4 | {"tokenizer.ggml.add_space_prefix": False}


def _same(tokenizer: Tokenizer, metadata: dict[str, Any]) -> bool:
    """Whether reading the metadata gives the same ids on all probes."""
    as_read = {k: np.array(v) if isinstance(v, list) and not isinstance(v[0], str) else v for k, v in metadata.items()}
    try:
        with guard.loading():
            again = Tokenizer.from_gguf(_File(as_read, tokenizer.source))
    except UserError:
        return False
    return all(
        again.encode(text, add_special, parse) == tokenizer.encode(text, add_special, parse)
        for text in (*PROBES, "", SPACE + "x", "".join(tokenizer.special_tokens.values()))
        for add_special, parse in ((True, True), (False, False))
    )
