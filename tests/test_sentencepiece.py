"""SentencePiece vocabularies of GGUF files."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from vocabularies import write_gguf

from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.tokenizer.metadata import NORMAL
from lorawgpu.tokenizer.sentencepiece import _merges

SP_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]


SP_WORDS = {"▁": -9.0, "h": -5.0, "e": -4.0, "l": -6.0, "o": -7.0, "he": -1.0, "ll": -2.0, "hell": -3.5, "lo": -1.5,
            "▁he": -3.0, "o▁": -8.0}  # fmt: skip


def sentencepiece_values(**changes):
    tokens = SP_PIECES + list(SP_WORDS)
    types = [2, 3, 3] + [6] * 256 + [1] * len(SP_WORDS)
    scores = [0.0] * len(SP_PIECES) + list(SP_WORDS.values())
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "unknown_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2} | changes  # fmt: skip


def test_sentencepiece(tmp_path):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **sentencepiece_values()))
    spell = SP_PIECES + list(SP_WORDS)

    def encode(text, **options):
        return [spell[i] for i in tokenizer.encode(text, **options)]

    # "▁hello": he (-1), then lo (-1.5) before ll (-2), then ▁he (-3)
    assert encode("hello") == ["▁he", "l", "lo"]
    assert encode("h é", add_special=True) == ["<s>", "▁", "h", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.add_bos
    for text in ("hello hello", " leading", "é 😀\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    without = sentencepiece_values(add_space_prefix=False, add_bos_token=False)
    bare = Tokenizer.from_gguf(write_gguf(tmp_path / "u.gguf", **without))
    assert not bare.add_bos
    assert [spell[i] for i in bare.encode("he he")] == ["he", "▁he"]
    assert bare.decode(bare.encode(" he")) == " he"


def test_doubled_tokens_and_odd_sentencepiece_are_rejected(tmp_path):
    values = sentencepiece_values(tokens=[*SP_PIECES, *list(SP_WORDS)[:-1], "he"])
    with pytest.raises(UserError, match="'he' appears twice"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **values))
    with pytest.raises(UserError, match="remove_extra_whitespaces"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "u.gguf", **sentencepiece_values(remove_extra_whitespaces=True)))


def test_merges_are_all_splits_of_a_piece_into_two_pieces():
    """Against the definition, on pieces that are made of each other in many ways."""
    rng = random.Random(5)
    pieces = list(dict.fromkeys("".join(rng.choices("ab", k=rng.randrange(1, 8))) for _ in range(120)))
    scores = np.array([float(rng.randrange(40)) for _ in pieces])
    file = SimpleNamespace(metadata={"tokenizer.ggml.scores": scores}, path="t.gguf")
    got = _merges(file, {piece: i for i, piece in enumerate(pieces)}, np.full(len(pieces), NORMAL))
    known = set(pieces)
    want = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in known and p[i:] in known]
    assert sorted(got) == sorted(want) and len(got) > 100
    order = [scores[pieces.index(left + right)] for left, right in got]
    assert order == sorted(order, reverse=True)


def test_pieces_that_would_take_quadratic_time_or_memory(tmp_path):
    values = sentencepiece_values()
    long = ["a" * 100_000, "b"]
    more = {"token_type": values["token_type"] + [1, 1], "scores": values["scores"] + [0.0, 0.0]}
    file = write_gguf(tmp_path / "long.gguf", **(values | more | {"tokens": values["tokens"] + long}))
    began = time.process_time()
    assert Tokenizer.from_gguf(file).encode("b")
    nested = ["a" * i for i in range(1, 3001)]
    more = {"token_type": values["token_type"] + [1] * 3000, "scores": values["scores"] + [0.0] * 3000}
    file = write_gguf(tmp_path / "nested.gguf", **(values | more | {"tokens": values["tokens"] + nested}))
    with pytest.raises(UserError, match=r"nested.gguf: its 3,011 tokens are made of each other in more than"):
        Tokenizer.from_gguf(file)
    assert time.process_time() - began < 5  # it was minutes, and 6 GB
