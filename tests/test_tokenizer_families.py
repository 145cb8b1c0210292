"""Tokenizers of GGUF files against the families' own tokenizer.json: ids of strings on which tokenizers disagree."""

import pytest
from nasty import nasty_strings
from tokenizers import AddedToken
from vocabularies import (
    BYTE_LEVEL,
    CONTROL,
    USER_DEFINED,
    byte_level_values,
    gemma4_values,
    gemma_values,
    published_byte_level,
    published_sentencepiece,
    sentencepiece_values,
    write_gguf,
)

from lorawgpu.tokenizer.hf import Tokenizer


def assert_same(ours: Tokenizer, published):
    """Ids, text and spans of all strings, with control tokens read as such and as text."""
    theirs = Tokenizer(published, ours.special_tokens, None, "published")
    for text in nasty_strings():
        for parse_special in (True, False):
            got, wanted = (t.encoding(text, parse_special=parse_special) for t in (ours, theirs))
            assert got.ids == wanted.ids, (text, parse_special, got.tokens, wanted.tokens)
            assert got.offsets == wanted.offsets, text
        assert ours.decode(got.ids) == theirs.decode(got.ids), text
        assert ours.decode(got.ids, skip_special=True) == theirs.decode(got.ids, skip_special=True), text


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level(tmp_path, pre):
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **byte_level_values(pre)))
    assert_same(ours, published_byte_level(pre))
    assert ours.add_bos == (pre in ("llama-bpe", "tekken"))
    composes = pre.startswith("qwen")
    for text in nasty_strings():
        again = ours.decode(ours.encode(text))
        assert again == text or (composes and not text.isascii())


def by_score(values):
    """SentencePiece's rule, as merges: the pair that makes the best piece first."""
    best = dict(zip(values["tokens"], values["scores"], strict=True))
    kinds = dict(zip(values["tokens"], values["token_type"], strict=True))
    pieces = {token for token, kind in kinds.items() if kind == 1}
    pairs = [(left, piece[len(left) :]) for piece in pieces for left in (piece[:i] for i in range(1, len(piece)))]
    pairs = [pair for pair in pairs if pieces.issuperset(pair)]
    index = {token: i for i, token in enumerate(values["tokens"])}
    return sorted(pairs, key=lambda p: (-best["".join(p)], -len(p[0]), index[p[0]]))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path, prefix):
    """Mistral 7B and Phi-3 put a space before the text."""
    values = sentencepiece_values(add_space_prefix=prefix)
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **values))
    assert_same(ours, published_sentencepiece(values, by_score(values), prefix))
    assert ours.add_bos
    unknown = ours.token_id("<unk>")
    for text in nasty_strings():
        ids = ours.encode(text, parse_special=False)
        assert unknown not in ids  # every character has its bytes
        if not prefix or not any(token in text for token in USER_DEFINED):  # a space comes after those, too
            assert ours.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3"])
def test_gemma(tmp_path, arch):
    """Runs of spaces are merged, runs of newlines are matched as a whole, and BOS is added."""
    values = gemma_values()
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", arch=arch, **values))
    merges = [tuple(merge.split(" ")) for merge in gemma4_values()["merges"]]
    lines = [t for t in values["tokens"] if len(t) > 1 and not t.strip("\n")]
    assert_same(ours, published_sentencepiece(values, merges, prefix=False, gemma=True, added=lines))
    assert ours.add_bos
    assert [ours.token_id("▁▁▁")] == ours.encode("   ")


@pytest.mark.parametrize("flag", [True, False, None])
def test_gemma4(tmp_path, flag):
    values = gemma4_values(add_bos_token=flag)
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", arch="gemma4", **values))
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    assert_same(ours, published_sentencepiece(values, merges, prefix=False, gemma=True))
    assert ours.add_bos  # some files say false, but no Gemma works without


def test_a_run_of_newlines_that_is_a_token_of_gemma4_stays_one(tmp_path):
    """Here no merge makes the run of 5."""
    values = gemma4_values()
    values["merges"] = [m for m in values["merges"] if len(m) != 6 or m.strip("\n ")]
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", arch="gemma4", **values))
    spell = [ours.encode(text) for text in ("\n\n\n\n\n", "a\n\n\n\n\na", "\n\na")]
    run, two, a = (ours.token_id(t) for t in ("\n" * 5, "\n\n", "a"))
    assert spell == [[run], [a, run, a], [two, a]]


def test_phi3_strips_after_its_control_tokens(tmp_path):
    values = sentencepiece_values()
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", arch="phi3", **values))
    published = published_sentencepiece(values, by_score(values), prefix=True)
    keep = ("<unk>", "<s>", "<|endoftext|>")
    published.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=t not in keep) for t in CONTROL])
    assert_same(ours, published)
    assert ours.encode("<|end|>\n<|end|> ") == [CONTROL.index("<|end|>")] * 2
    assert len(ours.encode("<s>\n")) > 1
