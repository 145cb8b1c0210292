"""Tokens that a tokenizer.json does not list as added, and tokens that the model's embedding has no row for.

The ids are those of transformers 5.24 (`AutoTokenizer.from_pretrained`), which `test_transformers` computes again.
"""

import json

import pytest
from byte_model import save_byte_model
from test_tokenizer import SPECIAL, gguf_values, save_folder, trained
from tiny_tokenizer import CONTROL, backend, tiny_tokenizer
from vocabularies import write_gguf

from lorawgpu import UserError
from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.formats import detect_type
from lorawgpu.generate.prompts import Prompts
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.loader import open_checkpoint

TEXT = "Yes<|im_end|>\n<|im_start|>"
END, START = CONTROL.index("<|im_end|>"), CONTROL.index("<|im_start|>")
DECODER = {"3": {"content": "<|im_end|>", "special": True}}


def unlisted(folder, config, *missing, older=None):
    """A tokenizer whose tokenizer.json has `missing` in the vocabulary alone."""
    data = json.loads(backend().to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in missing]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if older:
        (folder / "added_tokens.json").write_text(json.dumps(older))
    return folder


WAYS = {
    "eos_token": ({"eos_token": "<|im_end|>"}, None),
    "object": ({"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "normalized": False}}, None),
    "decoder": ({"added_tokens_decoder": DECODER}, None),
    "extra": ({"extra_special_tokens": ["<|im_end|>"]}, None),
    "extra by name": ({"extra_special_tokens": {"eot_token": "<|im_end|>"}}, None),
    "additional": ({"additional_special_tokens": ["<|im_end|>"]}, None),
    "older file": ({"eos_token": "</s>"}, {"<|im_end|>": END}),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_end_mark_is_one_token(tmp_path, way):
    config, older = WAYS[way]
    tokenizer = Tokenizer.from_hf_folder(unlisted(tmp_path / "t", config, "<|im_end|>", older=older))
    yes = tokenizer.encode("Yes")
    assert tokenizer.encode(TEXT) == [*yes, END, *tokenizer.encode("\n"), START]
    assert (END in tokenizer.special_ids) == (way != "older file")


def test_what_nothing_names_is_text(tmp_path):
    tokenizer = Tokenizer.from_hf_folder(unlisted(tmp_path / "t", {"eos_token": "</s>"}, "<|im_end|>"))
    assert END not in tokenizer.encode(TEXT)


def test_a_token_that_is_in_no_file_gets_the_next_id(tmp_path):
    config = {"eos_token": "<end>", "pad_token": "[PAD]", "extra_special_tokens": ["<x>", "</s>"]}
    tokenizer = Tokenizer.from_hf_folder(unlisted(tmp_path / "t", config))
    size = backend().get_vocab_size()
    assert [tokenizer.token_id(t) for t in ("<end>", "[PAD]", "<x>")] == [size, size + 1, size + 2]
    assert tokenizer.eos_id == size and tokenizer.encode("a<x>")[-1] == size + 2


def test_the_end_of_a_turn_is_trained_as_one_token(tmp_path):
    folder = unlisted(tmp_path / "t", {"eos_token": "<|im_end|>"}, "<|im_end|>")
    tokenizer = Tokenizer.from_hf_folder(folder)
    template = ChatTemplate(BUILT_IN["chatml"], tokenizer.special_tokens)
    encoder = Encoder("chat", EncodeSettings(64, "drop", False, ("assistant",)), tokenizer, template)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    sample = encoder("f", 1, {"messages": turns}).sample
    assert sample.labels[sample.labels >= 0].tolist() == [*tokenizer.encode("Yes"), END]
    assert Prompts(tokenizer, template).turn_end() == END


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id"])
def test_gguf(tmp_path, key):
    """llama.cpp makes the ends that a file names, or whose name it knows, control tokens, whatever their type."""
    values = gguf_values(trained())
    values["token_type"] = [
        1 if t == "<|im_end|>" else kind for t, kind in zip(values["tokens"], values["token_type"], strict=True)
    ]
    for changes in ({key: values["tokens"].index("<|im_end|>")}, {}):
        tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **values | changes))
        assert tokenizer.encode("a<|im_end|>") == [*tokenizer.encode("a"), SPECIAL.index("<|im_end|>")]


@pytest.mark.reference
@pytest.mark.parametrize("way", WAYS)
def test_transformers(tmp_path, way):
    transformers = pytest.importorskip("transformers")
    config, older = WAYS[way]
    folder = unlisted(tmp_path / "t", config, "<|im_end|>", older=older)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_hf_folder(folder)
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    config = {"eos_token": "<end>", "pad_token": "[PAD]", "extra_special_tokens": ["<x>", "</s>"]}
    folder = unlisted(tmp_path / "u", config)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), Tokenizer.from_hf_folder(folder)
    text = "a<x><end>[PAD]</s>"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


ROWS = backend().get_vocab_size()


def with_rows(rows, **keys):
    out = tiny_tokenizer(**keys)
    return Tokenizer(out._backend, out.special_tokens, BUILT_IN["chatml"], "tiny", rows)


def test_only_an_id_that_occurs_is_refused():
    top = ROWS - 1
    word = tiny_tokenizer().decode([top])
    assert tiny_tokenizer().encode(word) == [top]
    assert with_rows(ROWS).encode(word) == [top]
    short = with_rows(top)
    assert short.encode("z") == tiny_tokenizer().encode("z")
    for text in (word, f"z {word}"):
        with pytest.raises(UserError, match=rf"has the id {top}, but the model's embedding has {top} rows"):
            short.encode(text)


@pytest.mark.parametrize(
    "record",
    [
        {"text": "WORD"},
        {"prompt": "a", "completion": "WORD"},
        {"segments": [{"label": False, "text": "WORD"}, {"label": True, "text": "b"}]},
        {"messages": [{"role": "user", "content": "WORD"}, {"role": "assistant", "content": "b"}]},
        {"instruction": "WORD", "output": "b"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "WORD"}]},
    ],
)
def test_a_record_is_refused_by_its_line(record):
    short = with_rows(ROWS - 1)
    record = json.loads(json.dumps(record).replace("WORD", short.decode([ROWS - 1])))
    template = ChatTemplate(BUILT_IN["chatml"], short.special_tokens)
    settings = EncodeSettings(64, "drop", False, ("assistant",))
    encoder = Encoder(detect_type(record, ("f", 7)), settings, short, template)
    with pytest.raises(UserError, match=rf"f, line 7: token '.*' has the id {ROWS - 1}, .* {ROWS - 1} rows"):
        encoder("f", 7, record)


def test_both_kinds_of_checkpoint_know_their_rows(tmp_path):
    folder = save_byte_model(tmp_path / "hf")
    save_folder(folder, trained())  # 400 tokens, 320 rows
    with pytest.raises(UserError, match="has 320 rows"):
        open_checkpoint(folder).tokenizer().encode("The quick brown fox jumps over the lazy dog")


def test_special_tokens_of_a_config_are_one_token_too(tmp_path):
    """Also in the worker process where a model's tokenizer lives."""
    folder = save_byte_model(tmp_path / "hf")
    unlisted(folder, {"eos_token": "</s>"}, "<|im_end|>")
    renamed = open_checkpoint(folder).tokenizer().with_special_tokens({"eos_token": "<|im_end|>"})
    assert renamed.eos_id == END and END in renamed.added_ids and renamed.encode("<|im_end|>") == [END]
    with pytest.raises(UserError, match="eos_token '<no>' is not in the vocabulary"):
        open_checkpoint(folder).tokenizer().with_special_tokens({"eos_token": "<no>"})
