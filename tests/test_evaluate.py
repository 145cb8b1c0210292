"""The `evaluate` command against the reference and against evaluation in training."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from golden_case import SMALL_CASES, reference_case
from tiny_run import MODEL, write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.data.batching import IGNORE, Sample
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import Evaluation, evaluate_source
from lorawgpu.evaluate import __main__ as command
from lorawgpu.train import held_out
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.setup import prepare
from lorawgpu.util import progress
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint


def evaluate(capsys, *argv) -> dict:
    assert command.main(list(map(str, argv))) == 0
    return json.loads(capsys.readouterr().out)


def write_case(case: str, path):
    """The batch of a golden case as pre-tokenized JSONL."""
    arrays = np.load(MODEL.parent / case / "batch.npz")
    with open(path, "w") as file:
        for ids, labels, keep in zip(
            arrays["input_ids"], arrays["labels"], arrays["attention_mask"].astype(bool), strict=True
        ):
            file.write(json.dumps({"input_ids": ids[keep].tolist(), "labels": labels[keep].tolist()}) + "\n")
    return path


@pytest.mark.parametrize("case", SMALL_CASES)
def test_the_loss_of_a_golden_case(tmp_path, capsys, case):
    golden = reference_case(case)
    data = write_case(case, tmp_path / "d.jsonl")
    folder = MODEL.parent / case
    numbers = evaluate(capsys, "--model", folder, "--adapter", folder / "adapter_init", "--data", data)
    margin = golden.settings.get("rounding_margin", {}).get("loss", 1)
    tolerance = 5e-2 if margin < 3e-6 else max(1e-4, 5 * golden.settings["float32_vs_float64"]["loss"])  # the cases'
    assert numbers["loss"] == pytest.approx(golden.expected["loss"].item(), abs=tolerance)
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    assert numbers["tokens"] == golden.batch.targets and numbers.keys() == {"loss", "perplexity", "tokens"}


def test_equals_evaluation_in_training(tmp_path, runs, capsys):
    """Other capacities and neighbors; equal up to float32 rounding."""
    held_out = write_data(tmp_path / "v.jsonl", samples=9, seed=3)
    config = write_config(tmp_path, test_datasets=[{"path": str(held_out)}], eval_steps=2, max_steps=2)
    folder = runs.train(config)
    logged = [r for r in read_metrics(folder / "metrics.jsonl") if "eval_loss" in r]
    capsys.readouterr()
    numbers = evaluate(capsys, "--model", MODEL, "--adapter", folder, "--data", held_out)
    assert numbers["loss"] == pytest.approx(logged[-1]["eval_loss"], rel=1e-6)
    assert numbers["tokens"] == logged[-1]["eval_tokens"]


def test_an_evaluation_shows_how_far_it_is_and_can_be_ended(tmp_path, device, kernels, capsys, monkeypatch):
    """As submits are tiny here, it waits for each: all tokens are reported, in many pieces; what the caller raises ends
    it. The loss is the same as without."""
    run = prepare(load_config(write_config(tmp_path)))
    (source,) = run.data.train
    checkpoint = open_checkpoint(MODEL)
    engine = Engine(device, load_model(device, checkpoint), Options(64, 64, flops_per_submit=1.0), kernels=kernels)
    parts = []
    assert evaluate_source(engine, source, advance=parts.append).loss == evaluate_source(engine, source).loss
    total = int(source.lengths.sum())
    assert total - 1 <= sum(parts) <= total and len(parts) > 20 and min(parts) >= 0

    def stop(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_source(engine, source, advance=stop)
    monkeypatch.setattr(held_out, "flops_per_submit", lambda rate, limit: 1.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    assert command.main(["--model", str(MODEL), "--data", str(tmp_path / "data.jsonl")]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and re.search(rf"evaluating 8 samples: [5-9]\d% of {total} tokens\n", err)


def test_an_adapter_of_another_model_is_noted_here_and_in_training(tmp_path, capsys):
    adapter = shutil.copytree(MODEL / "adapter_init", tmp_path / "adapter")
    keys = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "org/Another"}
    (adapter / "adapter_config.json").write_text(json.dumps(keys))
    note = f"note: the adapter {adapter} was trained on 'org/Another'; this model is {MODEL}"
    config = write_config(tmp_path, adapter=str(adapter), lora_r=None, lora_alpha=None)
    evaluate_args = ["--model", MODEL, "--adapter", adapter, "--data", tmp_path / "data.jsonl"]
    assert command.main(list(map(str, evaluate_args))) == 0 and note in capsys.readouterr().err
    prepare(load_config(config))
    assert note in capsys.readouterr().err


def test_long_samples_are_truncated_and_reported(tmp_path, capsys):
    data = write_data(tmp_path / "d.jsonl", samples=4, longest=20)
    assert command.main(["--model", str(MODEL), "--data", str(data), "--sequence-len", "6"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == 4 * 4 and "4 truncated" in err


def test_token_mean_over_many_batches_not_mean_of_means(device, kernels):
    model = load_model(device, open_checkpoint(MODEL))
    samples = [Sample(*np.arange(3, 3 + n, dtype=np.int32)[None].repeat(2, 0)) for n in (3, 30, 7, 16, 2)]
    source = Source(samples)
    engine = Engine(device, model, Options(32, 32), kernels=kernels)
    whole = evaluate_source(engine, source)
    sums = [evaluate_source(engine, Source([s])) for s in samples]
    assert whole.tokens == sum(e.tokens for e in sums) == 2 + 29 + 6 + 15 + 1
    expected = sum(e.loss * e.tokens for e in sums) / whole.tokens
    assert whole.loss == pytest.approx(expected, rel=1e-6)  # float32, as above; a mean of means is off by percent
    with pytest.raises(ValueError, match="no sample has a target"):
        evaluate_source(engine, Source([Sample(samples[0].input_ids, np.full(3, IGNORE, np.int32))]))


class Source(list):
    @property
    def lengths(self):
        return np.array([len(s) for s in self])


def test_perplexity_that_overflows():
    assert Evaluation(1000.0, 1).perplexity == math.inf


def test_text_needs_a_tokenizer(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text('{"text": "hello"}\n')
    assert command.main(["--model", str(MODEL), "--data", str(tmp_path / "d.jsonl")]) == 2
    err = capsys.readouterr().err
    assert "data of type text needs the model's tokenizer" in err and "no tokenizer.json" in err


def test_a_length_that_is_too_small_or_too_large(tmp_path, capsys):
    data = write_data(tmp_path / "d.jsonl", samples=4)  # the first two tokens of each carry no loss
    argv = ["--model", str(MODEL), "--data", str(data), "--sequence-len"]
    assert command.main([*argv, "2"]) == 2
    assert "nothing to evaluate: 4 samples without a target token in their first 2 tokens" in capsys.readouterr().err
    assert command.main([*argv, "99999999999"]) == 2
    assert "--sequence-len 99999999999: wanted at least 2 tokens and at most 2147483647" in capsys.readouterr().err


def test_the_template_is_the_one_that_the_adapter_was_trained_with(tmp_path):
    """As generate has it: the loss with another template would say nothing about this adapter."""
    checkpoint = open_checkpoint(MODEL)
    (tmp_path / "config.yaml").write_text("chat_template: chatml\n")
    line = ["--model", str(MODEL), "--adapter", str(tmp_path), "--data", "x.jsonl"]
    assert command.config_of(command.parse(line), checkpoint).chat_template == "chatml"
    assert command.config_of(command.parse([*line, "--chat-template", "gemma"]), checkpoint).chat_template == "gemma"
