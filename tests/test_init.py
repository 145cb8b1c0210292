"""The `init` command: what it recognizes, and that the config it writes trains as written."""

import json
from pathlib import Path

import pytest
from tiny_run import byte_model, write_data

from lorawgpu import cli
from lorawgpu.config.load import load_config
from lorawgpu.init.__main__ import main
from lorawgpu.train.metrics import read_metrics

MODEL = "builtin:tiny-bitnet"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(name: str, *records) -> Path:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return Path(name)


def chats(count: int):
    return ({"messages": [{"role": "user", "content": f"{i:02}"}, {"role": "assistant", "content": "ok"}]}
            for i in range(count))  # fmt: skip


def comments(name: str) -> str:
    return "".join(line for line in Path(name).read_text().splitlines(keepends=True) if line.startswith("#"))


def test_a_chat_of_forty_samples(capsys):
    """A tenth is held out: 36 are left, so 3 a step give an epoch of 12."""
    write("my chats.jsonl", *chats(40))
    assert main(["--model", MODEL, "--data", "my chats.jsonl"]) == 0
    assert capsys.readouterr().out.startswith(
        "wrote my-chats.yaml\n  Model: builtin:tiny-bitnet: bitnet, ternary, 4 la"
    )
    config, said = load_config("my-chats.yaml"), comments("my-chats.yaml")
    assert "Data: chat (messages): 40 samples of " in said and "chat template: its own" in said
    assert (config.val_set_size, config.num_epochs, config.chat_template) == (0.1, 3, None)
    assert config.micro_batch_size * config.gradient_accumulation_steps == 3
    assert config.sequence_len == 64 and config.base_model == MODEL
    assert config.output_dir == str(Path("out/my-chats").absolute())
    Path("out/my-chats").mkdir(parents=True)
    assert main(["--model", MODEL, "--data", "my chats.jsonl", "--out", "second.yaml"]) == 0
    assert load_config("second.yaml").output_dir.endswith("my-chats-2")
    capsys.readouterr()
    assert main(["--model", MODEL, "--data", "my chats.jsonl"]) == 2
    assert "my-chats.yaml already exists" in capsys.readouterr().err


def test_other_names_validation_files_and_another_folder():
    for name, count in (("train", 5), ("valid", 2), ("test", 1)):
        write(f"qa/{name}.jsonl", *({"question": str(i), "answer": "ok"} for i in range(count)))
    assert main(["--model", MODEL, "--data", "qa", "--out", "configs/qa.yaml"]) == 0
    config, said = load_config("configs/qa.yaml"), comments("configs/qa.yaml")
    assert "Data: question/answer (`question` is the user's turn, `answer` the assistant's): 5 samples" in said
    assert "Held out: 2 samples of the folder's validation files" in said and "test.jsonl not read" in said
    assert config.val_set_size == 0 and config.datasets[0].path == str(Path("qa").absolute())


def test_long_samples_are_dropped_and_counted():
    """One of 50 samples has about ten times the context's length; it is cut there, and not counted on."""
    records = [{"text": "word " * 40}] * 49 + [{"text": "word " * 4000}]
    write("texts.jsonl", *records)
    assert main(["--model", MODEL, "--data", "texts.jsonl"]) == 0
    assert load_config("texts.yaml").sequence_len == 512  # the context


def test_what_the_keys_do_not_decide_is_asked_for(capsys):
    write("both.jsonl", *({"text": "a b c", "instruction": "Hi", "output": "Yes"} for _ in range(3)))
    assert main(["--model", MODEL, "--data", "both.jsonl"]) == 2
    assert "the keys fit several formats (alpaca, text)" in capsys.readouterr().err
    assert main(["--model", MODEL, "--data", "both.jsonl", "--type", "text"]) == 0
    assert load_config("both.yaml").datasets[0].type == "text"


def test_a_model_without_a_template_gets_one_for_chats_only(tmp_path):
    model = str(byte_model(tmp_path / "model"))
    keys = {"eos_token": "\u0120"}  # a byte of the vocabulary
    Path(model, "tokenizer_config.json").write_text(json.dumps(keys))
    write("chats.jsonl", *chats(3))
    write("texts.jsonl", {"text": "abcdef"})
    for data, template in (("chats.jsonl", "alpaca"), ("texts.jsonl", None)):
        assert main(["--model", model, "--data", data]) == 0
        assert load_config(Path(data).with_suffix(".yaml")).chat_template == template


def test_the_config_trains_as_written(tmp_path, train_main):
    data = write_data(tmp_path / "ids.jsonl", samples=24)
    model = str(byte_model(tmp_path / "model"))
    assert main(["--model", model, "--data", str(data)]) == 0
    assert train_main(["ids.yaml"]) == 0
    records = read_metrics(Path("out/ids/metrics.jsonl"))
    # 24 samples, 2 of them held out; 2 a step: 11 steps an epoch, each ending with an evaluation
    assert [r["step"] for r in records if "eval_loss" in r] == [11, 22, 33]


def test_it_is_a_command(capsys):
    assert cli.main(["init", "--data", "x"]) == 2
    assert "the following arguments are required: --model" in capsys.readouterr().err
