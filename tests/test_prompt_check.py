"""Answers that training and generation start differently, two BOS, and what a GGUF does not say of its model.

The right values are by hand.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from byte_model import save_byte_model
from test_dataset import loading
from test_gguf import write_gguf
from test_tokenizer import gguf_values
from tiny_run import write_config
from tiny_tokenizer import backend, tiny_tokenizer

from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.config.load import load_config
from lorawgpu.data.dataset import DatasetSpec, tokenize
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.generate.prompts import Prompts
from lorawgpu.gpu import open_dry_device
from lorawgpu.train.__main__ import main
from lorawgpu.train.placement import build_engine
from lorawgpu.train.setup import prepare
from lorawgpu.train.summary import notes_of, plan_of
from lorawgpu.weights.gguf_checkpoint import lost_window
from lorawgpu.weights.loader import open_checkpoint

TURNS = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
THINK = TURNS + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
THOUGHT = [PLAIN[0], {"role": "assistant", "content": "<think>\nI greet.\n</think>\n\nHello there."}]
RECORDS = [{"messages": PLAIN}, {"messages": THOUGHT}, {"prompt": PLAIN[:1], "completion": PLAIN[1:]}]


def counts(tmp_path, template, *records):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tokenize(DatasetSpec(str(path)), loading(template=template, sequence_len=500)).counts


@pytest.mark.parametrize(("record", "differs"), [*zip(RECORDS, (1, 0, 1), strict=True)])
def test_records_whose_answer_does_not_follow_the_prompt(tmp_path, record, differs):
    assert counts(tmp_path, THINK, record).other_prompt == differs
    assert counts(tmp_path, "chatml", record).other_prompt == 0


def test_only_what_is_trained_last_counts(tmp_path):
    again = [*PLAIN, *THOUGHT]
    assert counts(tmp_path, THINK, {"messages": again}).other_prompt == 0
    assert counts(tmp_path, THINK, {"messages": [*THOUGHT, PLAIN[0]]}).other_prompt == 0


def test_the_plan_and_the_preview_say_what_to_do(tmp_path, capsys):
    model = save_byte_model(tmp_path / "m")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS[:2]))
    keys = {"base_model": str(model), "datasets": [{"path": str(tmp_path / "d.jsonl")}], "sequence_len": 160}
    config = write_config(tmp_path / "run", **keys, chat_template_jinja=THINK)
    run = prepare(load_config(config))
    note = plan_of(run, build_engine(run, open_dry_device(None)))["note"]
    assert "1 samples: a last answer follows '' in training, but '<think>\\n' in generation" in note
    assert "begin the answers with '<think>\\n'" in note and "chat_template_jinja" in note
    assert main([str(config), "--preview", "1"]) == 0
    assert "begin the answers with '<think>\\n', or use" in capsys.readouterr().out
    plain = write_config(tmp_path / "plain", **keys)
    assert main([str(plain), "--preview", "1"]) == 0 and "in generation" not in capsys.readouterr().out


def test_a_prompt_that_training_goes_beyond():
    """As Qwen3: a block of no thoughts is put before an answer, and a generation has to write it."""
    block = "{%- if loop.last and m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content"
    template = TURNS.replace("+ m.content", "}}" + block.replace("{{ m.content", "{{- m.content"))
    template = ChatTemplate(template + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}", {})
    assert "follows '<think>\\n\\n</think>\\n\\n' in training, but '' in generation" in prompt_note(template)


# BOS


@pytest.mark.parametrize("text", ["Yes", "<s>Yes", "<s>", ""])
def test_raw_text_has_one_bos_as_in_training(text):
    tokenizer = tiny_tokenizer(add_bos=True)
    encoder = Encoder("text", EncodeSettings(64, "raise", False, ("assistant",)), tokenizer, None)
    ids = Prompts(tokenizer, None).encode(text, raw=True)
    assert ids == [0, *backend().encode(text.removeprefix("<s>"), add_special_tokens=False).ids]
    if text.removeprefix("<s>"):
        assert encoder("f", 1, {"text": text}).sample.input_ids.tolist() == [*ids, 1]


def test_without_a_bos_of_its_own_the_text_has_the_last_word():
    assert Prompts(tiny_tokenizer(), None).encode("<s>Yes", raw=True)[0] == 0


# What a GGUF does not say


def test_a_gguf_without_its_pre_tokenizer(tmp_path, capsys):
    values = gguf_values(backend(), pre="gpt-2")
    for pre, words in ((None, "no tokenizer.ggml.pre, so text is split by llama.cpp's default"), ("gpt-2", "")):
        keys = {f"tokenizer.ggml.{key}": value for key, value in (values | {"pre": pre}).items() if value is not None}
        open_checkpoint(write_gguf(tmp_path / f"{pre}.gguf", metadata=keys))
        err = capsys.readouterr().err
        assert words in err if words else err == ""
    open_checkpoint(write_gguf(tmp_path / "none.gguf"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("metadata", "file", "said"),
    [
        ({"general.name": "Mistral 7B Instruct v0.1"}, "m.gguf", True),
        ({"general.basename": "Mistral"}, "m.gguf", True),
        ({"general.base_model.0.name": "Mistral 7B v0.1"}, "m.gguf", True),
        ({}, "mistral-7b-q4.gguf", True),
        ({"general.name": "Llama"}, "m.gguf", False),
    ],
)
def test_a_mistral_in_gguf_lost_its_window(tmp_path, metadata, file, said):
    checkpoint = open_checkpoint(write_gguf(tmp_path / file, metadata=metadata))
    assert lost_window(checkpoint, 4096) == ""
    assert ("sliding window" in lost_window(checkpoint, 4097)) == said
    assert ("the longest has 5,000" in lost_window(checkpoint, 5000)) == said


def test_the_plan_says_so(tmp_path):
    model = write_gguf(tmp_path / "mistral.gguf")
    ids = np.arange(5000) % 300
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": ids.tolist()}) + "\n")
    datasets = [{"path": str(tmp_path / "d.jsonl")}]
    config = load_config(write_config(tmp_path, base_model=str(model), datasets=datasets, sequence_len=5000))
    run = replace(prepare(config), longest=5000)
    assert any("more than 4,096 tokens (the longest has 5,000)" in note for note in notes_of(run))
