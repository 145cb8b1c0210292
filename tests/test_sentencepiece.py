"""SentencePiece vocabularies of GGUF files."""

import pytest
from vocabularies import write_gguf

from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer

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
