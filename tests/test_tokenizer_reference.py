"""Tokenizers of GGUF files against transformers' own classes, and its own reading of the same file."""

import pytest
from nasty import nasty_strings
from vocabularies import byte_level_values, gemma4_values, gemma_values, sentencepiece_values, write_gguf

from lorawgpu.tokenizer.hf import Tokenizer

pytestmark = pytest.mark.reference


def assert_same_ids(ours, theirs):
    for text in nasty_strings():
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def of_file(folder, arch, values):
    """(our tokenizer, transformers' one) of a GGUF."""
    ours = Tokenizer.from_gguf(write_gguf(folder / "t.gguf", arch=arch, **values))
    backend = pytest.importorskip("transformers.tokenization_utils_tokenizers").TokenizersBackend
    return ours, backend.from_pretrained(str(folder), gguf_file="t.gguf")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "dbrx", "smaug-bpe", "gpt-4o", "tekken"])
def test_byte_level(tmp_path, pre):
    ours, theirs = of_file(tmp_path, "llama", byte_level_values(pre))
    if pre in ("llama-bpe", "tekken"):  # transformers leaves this out when it reads a GGUF
        theirs.backend_tokenizer.model.ignore_merges = True
    assert_same_ids(ours, theirs)


@pytest.mark.parametrize(("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer")])
def test_qwen(tmp_path, pre, name):
    transformers = pytest.importorskip("transformers")
    values = byte_level_values(pre)
    ours, read = of_file(tmp_path, "qwen2", values)
    vocabulary = {token: i for i, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    theirs = getattr(transformers, name)(vocab=vocabulary, merges=merges)
    for token_id, token in read.added_tokens_decoder.items():
        assert theirs.convert_tokens_to_ids(str(token)) == token_id
        theirs.add_tokens([token], special_tokens=token.special)
    assert_same_ids(ours, theirs)


def test_sentencepiece(tmp_path):
    """As Phi-3, whose tokenizer puts a space before the text, and Mistral 7B; without what Phi-3 strips."""
    ours = Tokenizer.from_gguf(write_gguf(tmp_path / "mistral.gguf", **sentencepiece_values()))
    _, theirs = of_file(tmp_path, "phi3", sentencepiece_values())
    assert_same_ids(ours, theirs)


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3", "gemma4"])
def test_gemma(tmp_path, arch):
    values = gemma4_values() if arch == "gemma4" else gemma_values()
    assert_same_ids(*of_file(tmp_path, arch, values))


def test_gemmas_class(tmp_path):
    transformers = pytest.importorskip("transformers")
    values = gemma4_values()
    ours, read = of_file(tmp_path, "gemma4", values)
    vocabulary = {token: i for i, token in enumerate(values["tokens"])}
    theirs = transformers.GemmaTokenizer(vocab=vocabulary, merges=[tuple(m.split(" ")) for m in values["merges"]])
    for token in read.added_tokens_decoder.values():
        theirs.add_tokens([token], special_tokens=token.special)
    assert_same_ids(ours, theirs)
