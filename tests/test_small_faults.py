"""Small faults that people met: files in another encoding, or none at all; settings; advice. Right values by hand."""

import io
import json
import os
import sys

import numpy as np
import pytest
import yaml
from golden_case import GOLDEN
from test_dataset import ids_of, loading, tokens
from test_gguf import write_gguf
from test_loader import copy_case, rewrite
from tiny_run import write_config, write_data

import lorawgpu
from lorawgpu.chat.template import resolve_template
from lorawgpu.config.load import load_config
from lorawgpu.data.dataset import DatasetSpec, load, tokenize
from lorawgpu.data.preview import marked, summary
from lorawgpu.data.read_files import read
from lorawgpu.data.token_store import Counts
from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import read_bytes
from lorawgpu.generate.prompt_file import read_prompts
from lorawgpu.gpu import open_dry_device
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.placement import _advice
from lorawgpu.train.setup import prepare
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


# Files that are something else


@pytest.mark.parametrize("name", ["d.jsonl", "m.gguf", "p.txt"])
def test_what_is_no_file_is_called_by_its_name(tmp_path, name):
    """A pipe, such as a shell's `<(zcat data.gz)`; it is never opened, because it may block."""
    path = tmp_path / name
    read = {
        "d.jsonl": lambda: list(tokenize(DatasetSpec(str(path)), loading(tmp_path))),
        "m.gguf": lambda: open_checkpoint(path),
        "p.txt": lambda: read_bytes(path, 100),
    }[name]
    os.mkfifo(path)
    with pytest.raises(UserError, match="this is a named pipe, .* once: save what it gives in a file, and name that"):
        read()
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="a link to a file that is not there"):
        read()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_lfs_pointer_in_a_model_is_called_by_its_name(tmp_path, name):
    folder = copy_case("llama_dense", tmp_path)
    (folder / name).write_bytes(POINTER)
    with pytest.raises(UserError, match=rf"{name}: this is a Git LFS pointer, .* `git lfs pull`"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.parquet"])
def test_an_lfs_pointer_as_data_or_gguf(tmp_path, name):
    for path in (tmp_path / name, tmp_path / "m.gguf"):
        path.write_bytes(POINTER)
    with pytest.raises(UserError, match="this is a Git LFS pointer"):
        tokenize(DatasetSpec(str(tmp_path / name)), loading())
    with pytest.raises(UserError, match="this is a Git LFS pointer"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_folder_of_gguf_files(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=r"the model is a GGUF file in it: name that file, .*/m.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "n.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"it holds 2 GGUF files: name one of them, such as .*/m.gguf"):
        open_checkpoint(tmp_path)


def test_a_gguf_of_the_hub_by_half_its_name(tmp_path):
    with pytest.raises(UserError, match="owner/m.gguf: no such file. A GGUF file of the hub is named owner/model/file"):
        open_checkpoint("owner/m.gguf")
    with pytest.raises(UserError, match="does not exist .*; a GGUF file of the hub is named owner/model/file.gguf"):
        load_config(write_config(tmp_path, base_model="owner/m.gguf"))
    whole = write_config(tmp_path / "b", base_model="owner/model/m.gguf")
    assert load_config(whole).base_model == "owner/model/m.gguf"


# UTF-16, as PowerShell's > writes it


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-8"])
def test_text_files_with_a_byte_order_mark(tmp_path, encoding):
    def write(name, text):
        (tmp_path / name).write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode(encoding))
        return tmp_path / name

    for name, text in {
        "d.jsonl": json.dumps({"text": "naïve 😀"}) + '\n{"text": "b"}\n',
        "d.json": json.dumps([{"text": "naïve 😀"}, {"text": "b"}], ensure_ascii=False),
        "d.csv": "text\nnaïve 😀\nb\n",
    }.items():
        store = tokenize(DatasetSpec(str(write(name, text))), loading())
        assert loading().tokenizer.decode(store[0].input_ids) == "naïve 😀</s>" and len(store) == 2
    assert read_prompts(str(write("p.txt", "Who?\nHow?\n"))) == {1: "Who?", 2: "How?"}
    assert resolve_template(None, str(write("t.jinja", "{{ 1 }}\nx")), None, {}).render([]) == "1\nx"
    config = yaml.safe_load(write_config(tmp_path).read_text())
    assert load_config(write("c.yaml", yaml.safe_dump(config))).lora_r == 4


def test_utf16_that_is_cut(tmp_path):
    (tmp_path / "d.jsonl").write_bytes("\ufeff{}".encode("utf-16-le")[:-1])
    with pytest.raises(UserError, match="not valid UTF-16 at byte .*: save the file as UTF-8"):
        list(read(tmp_path / "d.jsonl"))


# Objects that hold all records


RECORDS = [tokens(1, 2), tokens(3, 4)]


@pytest.mark.parametrize(
    ("value", "indent", "lines"),
    [
        ({"data": RECORDS}, None, [1, 1]),
        ({"data": RECORDS}, 1, [3, 13]),
        ({"version": [1], "info": {"data": []}, "examples": RECORDS}, None, [1, 1]),
        ({"rows": RECORDS, "n": 2}, 2, [3, 13]),
        (RECORDS, None, [1, 1]),
        (RECORDS[0], 1, [1]),
        (RECORDS[0], None, [1]),
    ],
)
def test_a_json_file_may_be_an_object(tmp_path, value, indent, lines):
    path = tmp_path / "d.json"
    path.write_text(json.dumps(value, indent=indent))
    store = tokenize(DatasetSpec(str(path)), loading())
    assert ids_of(store) == [[1, 2], [3, 4]][: len(lines)]
    assert [store.place(i)[1] for i in range(len(store))] == lines


def test_lines_in_a_json_file_stay_lines(tmp_path):
    path = tmp_path / "d.json"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert ids_of(tokenize(DatasetSpec(str(path)), loading())) == [[1, 2], [3, 4]]
    path.write_text('{"input_ids": [1,\n' + path.read_text())
    with pytest.raises(UserError, match="line 1: not valid JSON"):
        tokenize(DatasetSpec(str(path)), loading())


# Settings


def test_a_held_out_size_of_everything(tmp_path):
    with pytest.raises(UserError, match=r"val_set_size: got 1.0; that is all samples, or one: wanted a fraction below"):
        load_config(write_config(tmp_path, val_set_size=1.0))
    config = load_config(write_config(tmp_path, val_set_size=1))
    assert config.val_set_size == 1 and "val_set_size: 1\n" in config.dump_yaml()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 'x\nc: 2\nd: 3\n", 2),
        ("a: 1\nb: [1, 2\nc: 2\nd: 3\n", 2),
        ("a: 1\nb: {x: 1\nc: 2\n\n", 2),
        ("a: 1\nb\nc: 2\n", 2),
        ("a: 1\nb: 2024-99-99\nc: 2\n", 2),
        ("a: 1\nb: x\x07\nc: 2\n", 2),
        ("a: 1\nb: c: d\n", 2),
        ("a: 1\n\tb: 2\n", 2),
        ("a: 1\nb: *no\n", 2),
    ],
)
def test_a_yaml_error_names_the_line_of_the_fault(tmp_path, text, line):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"c.yaml, line {line}[,:].*not valid YAML"):
        load_config(tmp_path / "c.yaml")


# Advice


def test_no_advice_to_truncate_what_is_truncated():
    dropped = Counts(dropped=2)
    assert "excess_length_strategy" in summary(dropped)
    assert "Raise it" in summary(dropped, True) and "excess_length_strategy" not in summary(dropped, True)


def test_no_advice_of_what_is_set(tmp_path, monkeypatch):
    from lorawgpu.errors import DeviceError
    from lorawgpu.train import placement

    def fits(limit):
        def engine(run, device, model, capacity, checkpointing):
            if capacity > limit:
                raise DeviceError("no")

        monkeypatch.setattr(placement, "engine_of", engine)

    device = open_dry_device(None)
    datasets = [{"path": str(write_data(tmp_path / "d.jsonl", longest=500))}]
    keys = {"datasets": datasets, "sequence_len": 600, "gradient_checkpointing": True}
    run = prepare(load_config(write_config(tmp_path, **keys, micro_batch_size=1)))
    fits(128)
    said = _advice(run, device, None, {})
    assert said.startswith("It would fit with sequence_len ") and "checkpointing" not in said and "micro" not in said
    run = prepare(load_config(write_config(tmp_path, **keys, micro_batch_size=2)))
    said = _advice(run, device, None, {})
    assert said.startswith("It would fit with micro_batch_size 1 and sequence_len ")


# A console of Windows


def test_a_preview_on_a_console_of_256_characters(monkeypatch):
    sample = load_sample()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    assert marked(sample, None, color=False) == "1 [[2 ]]"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert marked(sample, None, color=False) == "1 ⟦2 ⟧"


def load_sample():
    from lorawgpu.data.batching import Sample

    return Sample(np.array([1, 2], np.int32), np.array([-100, 2], np.int32))


# Weights that are not finite


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", 0x7FC0),
        ("model.embed_tokens.weight", 0xFF80),
        ("model.norm.weight", 0x7FC0),
        ("model.layers.0.input_layernorm.weight", 0x7F80),
    ],
)
def test_a_base_with_nan_is_found_as_it_is_loaded(tmp_path, device, name, value):
    folder = copy_case("llama_dense", tmp_path)

    def spoil(tensors):
        dtype, data = tensors[name]
        data = data.copy()
        data.reshape(-1)[3] = value
        tensors[name] = (dtype, data)

    rewrite(folder, spoil)
    with pytest.raises(UserError, match=rf"{name}: has values that are not finite \(NaN or infinity\)"):
        load_model(device, open_checkpoint(folder))


# Continuing from an adapter


def test_before_is_the_adapter_to_continue_from(tmp_path, runs):
    held = [{"path": str(write_data(tmp_path / "held.jsonl", samples=3, seed=7))}]
    first = runs.train(write_config(tmp_path / "a", test_datasets=held, max_steps=2))
    last = [r["eval_loss"] for r in read_metrics(first / "metrics.jsonl") if "eval_loss" in r][-1]
    keys = {"adapter": str(first), "lora_r": None, "lora_alpha": None}
    second = runs.train(write_config(tmp_path / "b", test_datasets=held, max_steps=1, **keys))
    (before,) = [r["base_eval_loss"] for r in read_metrics(second / "metrics.jsonl") if "base_eval_loss" in r]
    assert before == last


# The Python API's errors


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: lorawgpu.load("no such model"),
        lambda: lorawgpu.load(None),
        lambda: lorawgpu.load(GOLDEN / "llama_dense", adapter="none"),
        lambda: lorawgpu.load(GOLDEN / "llama_dense", device="no such device"),
        lambda: lorawgpu.Sampling(temperature=-1).check(),
    ],
)
def test_wrong_arguments_raise_the_packages_error(wrong):
    assert lorawgpu.UserError is UserError and issubclass(lorawgpu.UserError, ValueError)
    with pytest.raises(lorawgpu.UserError):
        wrong()


def test_split_of_all_samples_is_refused(tmp_path):
    path = write_data(tmp_path / "d.jsonl", samples=2)
    with pytest.raises(UserError, match="leaves nothing to train on"):
        load([DatasetSpec(str(path))], loading(), 2, seed=0)
