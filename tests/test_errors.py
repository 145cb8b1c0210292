"""Every mistake with `train` and `evaluate`: exit code 2, one message that names it, no traceback."""

import json
import shutil
import subprocess
import sys

import pytest
from tiny_run import MODEL, write_config

from lorawgpu.evaluate import __main__ as evaluate
from lorawgpu.train import __main__ as train


def model_with(tmp_path, **keys):
    """A copy of the model with keys of its config.json changed."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return {"base_model": str(folder)}


def adapter_with(tmp_path, **keys):
    """A copy of an adapter with keys of its adapter_config.json changed."""
    folder = shutil.copytree(MODEL / "adapter_init", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text()) | keys
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {"adapter": str(folder), "lora_r": None, "lora_alpha": None}


def data_with(tmp_path, *lines):
    (tmp_path / "bad.jsonl").write_text("".join(line + "\n" for line in lines))
    return {"datasets": [{"path": str(tmp_path / "bad.jsonl")}]}


GOOD = '{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}'
CASES = {
    "unknown key": (lambda t: {"lora_rank": 4}, "lora_rank: unknown key; here it is lora_r"),
    "negative rank": (lambda t: {"lora_r": -4}, "lora_r: got -4"),
    "word for a number": (lambda t: {"learning_rate": "fast"}, "learning_rate: got 'fast'"),
    "unknown target": (lambda t: {"lora_target_modules": ["c_attn"]}, "unknown module 'c_attn'"),
    "target in no layer": (lambda t: {"lora_target_modules": ["layers.7.self_attn.q_proj"]}, "matches no linear layer"),
    "pattern in no layer": (
        lambda t: {"lora_target_modules": "layers.*q_proj"},
        "has to match whole paths, such as model",
    ),
    "missing model": (lambda t: {"base_model": str(t / "none")}, "none' does not exist"),
    "no base_model": (lambda t: {"base_model": None}, "base_model: missing"),
    "missing data": (lambda t: {"datasets": [{"path": str(t / "none.jsonl")}]}, "none.jsonl' does not exist"),
    "no data sets": (lambda t: {"datasets": []}, "datasets: got []"),
    "unsupported architecture": (lambda t: model_with(t, model_type="gpt2", architectures=["GPT2LMHeadModel"]), "gpt2"),
    "unsupported option": (lambda t: model_with(t, hidden_act="gelu"), "gelu"),
    "unsupported rope": (lambda t: model_with(t, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
    "shape of another model": (lambda t: model_with(t, hidden_size=32), "model.embed_tokens.weight"),
    "missing adapter": (lambda t: {"adapter": str(t / "none")}, "none' does not exist"),
    "adapter of another rank": (lambda t: adapter_with(t, r=8), "has shape [4, 64]"),
    "adapter with DoRA": (lambda t: adapter_with(t, use_dora=True), "use_dora"),
    "rank in addition to an adapter": (lambda t: adapter_with(t) | {"lora_r": 16}, "lora_r is 16, but the adapter"),
    "line that is not JSON": (lambda t: data_with(t, GOOD, "{"), "bad.jsonl, line 2: not valid JSON"),
    "broken line, with advice": (lambda t: data_with(t, GOOD, "{"), ". --skip-bad-lines skips such records"),
    "line without keys": (lambda t: data_with(t, GOOD, '{"a": 1}'), "bad.jsonl, line 2"),
    "unknown format": (lambda t: data_with(t, '{"a": 1}'), "bad.jsonl, line 1"),
    "id outside the vocabulary": (
        lambda t: data_with(t, '{"input_ids": [1, 999], "labels": [1, 999]}'),
        "bad.jsonl, line 1: token id 999 is outside the model's vocabulary of 320",
    ),
    "nothing trained": (
        lambda t: data_with(t, '{"input_ids": [1, 2], "labels": [-100, -100]}'),
        "bad.jsonl, line 1: this record has no target tokens",
    ),
    "everything dropped": (lambda t: {"sequence_len": 2}, "nothing to train: 8 samples dropped"),
    "everything dropped, with advice": (lambda t: {"sequence_len": 2}, "skipped. Raise sequence_len, or set exces"),
    "too long, set to raise": (
        lambda t: {"sequence_len": 8, "excess_length_strategy": "raise"},
        "more than sequence_len 8",
    ),
    "empty file": (lambda t: data_with(t), "bad.jsonl"),
    "text without a tokenizer": (lambda t: data_with(t, '{"text": "a"}'), "needs the model's tokenizer"),
    "held out: everything": (lambda t: {"val_set_size": 8}, "leaves nothing to train on: there are only 8 samples"),
    "evaluation of nothing": (lambda t: {"eval_steps": 2}, "eval_steps has nothing to evaluate"),
    "no such device": (lambda t: {"device": "Voodoo"}, "device 'Voodoo'"),
    "no GPU": (lambda t: {"device": "gpu"}, "device 'gpu': no such adapter"),
}


def fails(capsys, argv, words, main=train.main):
    assert main(list(map(str, argv))) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("error: ") == 1 and words in err and "Traceback" not in err, err


@pytest.mark.parametrize("name", CASES)
def test_bad_input(tmp_path, capsys, monkeypatch, name):
    monkeypatch.delenv("LORAWGPU_DEVICE", raising=False)
    keys, words = CASES[name]
    fails(capsys, [write_config(tmp_path, **keys(tmp_path))], words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("base_model: [a\n", "not valid YAML"),
        ("", "contains nothing; wanted `key: value` lines"),
        ("- a\n- b\n", "contains a list"),
        ("lora_r: 4\nlora_r: 8\n", "lora_r: set twice"),
    ],
)
def test_broken_yaml(tmp_path, capsys, content, words):
    (tmp_path / "c.yaml").write_text(content)
    fails(capsys, [tmp_path / "c.yaml"], words)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no config given"),
        (["none.yaml"], "none.yaml"),
        (["{config}", "--set", "lora_r"], "wanted key=value"),
        (["{config}", "--set", "lora_r=0"], "lora_r: got 0"),
        (["{config}", "--preview", "-1"], "--preview -1"),
        (["{config}", "--json"], "--json needs --preview"),
        (["{config}", "--resume", "nowhere"], "nowhere: no such folder"),
        (["{config}", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_command_lines(tmp_path, capsys, argv, words):
    config = str(write_config(tmp_path))
    fails(capsys, [a.replace("{config}", config) for a in argv], words)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "{model}"], "--data"),
        (["--model", "none", "--data", "{data}"], "none: no such file or folder"),
        (["--model", "{model}", "--data", "none.jsonl"], "none.jsonl"),
        (["--model", "{model}", "--data", "{data}", "--adapter", "none"], "none: no such folder"),
        (["--model", "{model}", "--data", "{data}", "--sequence-len", "1"], "--sequence-len 1"),
        (["--model", "{model}", "--data", "{data}", "--device", "Voodoo"], "device 'Voodoo'"),
    ],
)
def test_wrong_evaluations(tmp_path, capsys, argv, words):
    (tmp_path / "d.jsonl").write_text(GOOD + "\n")
    names = {"{model}": str(MODEL), "{data}": str(tmp_path / "d.jsonl")}
    fails(capsys, [names.get(a, a) for a in argv], words, evaluate.main)


def test_an_output_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    fails(capsys, [write_config(tmp_path, output_dir=str(tmp_path / "file"))], "is a file; wanted a folder")


def test_bad_lines_can_be_skipped(tmp_path, capsys):
    config = write_config(tmp_path, **data_with(tmp_path, GOOD, "{", GOOD))
    assert train.main([str(config), "--dry-run", "--skip-bad-lines"]) == 0
    assert "2 samples" in (out := capsys.readouterr().out) and "1 skipped" in out


def test_from_the_shell_there_is_one_line_and_no_traceback(tmp_path):
    config = write_config(tmp_path, lora_rank=4)
    done = subprocess.run([sys.executable, "-m", "lorawgpu.train", str(config)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
