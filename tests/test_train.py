"""The training loop from a config file to an adapter: what it learns, logs, and leaves unchanged."""

import json
import math
import re

import numpy as np
import pytest
import wgpu
import yaml
from golden_case import GOLDEN, reference_model
from tiny_run import MODEL, adapter_bytes, byte_model, losses, write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.batching import IGNORE, Sample, flatten
from lorawgpu.engine.evaluation import Evaluation, evaluate_source
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.optim.schedule import Schedule
from lorawgpu.reference.adamw import grad_norm
from lorawgpu.reference.model import step_gradients
from lorawgpu.train import __main__ as command
from lorawgpu.train import evaluator
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.setup import Intervals, intervals_of, prepare
from lorawgpu.train.trainer import Trainer
from lorawgpu.weights.loader import open_checkpoint

ADAPTER = MODEL / "adapter_init"  # B is not zero: every gradient is alive


def test_eight_examples_are_memorized(tmp_path, capsys):
    config = write_config(tmp_path, micro_batch_size=8, max_steps=60, learning_rate=2e-2, logging_steps=20)
    assert command.main([str(config)]) == 0
    folder = tmp_path / "out"
    assert losses(folder)[0] > 5 and losses(folder)[-1] < 0.05
    lora, tensors = read_adapter(folder, open_checkpoint(MODEL).config)
    assert lora.r == 4 and all(np.isfinite(t).all() for t in tensors.values())
    out, err = capsys.readouterr()
    for word in ("device ", "adapter ", "memory ", "weights", "60 steps"):
        assert word in out
    assert "step 60/60 loss 0.0" in err and "tok/s" in err
    assert load_config(folder / "config.yaml") == load_config(config)
    first = read_metrics(folder / "metrics.jsonl")[0]
    assert first["step"] == 0 and "trainable parameters" in first["plan"]["adapter"]


def test_runs_with_the_same_seed_are_identical_and_with_another_are_not(tmp_path, runs):
    keys = {"lora_dropout": 0.2, "gradient_accumulation_steps": 2, "max_steps": 5}
    a, b, c = (runs.train(write_config(tmp_path / n, **keys, seed=s)) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    assert adapter_bytes(a) == adapter_bytes(b) != adapter_bytes(c)
    assert losses(a) == losses(b) != losses(c)


def test_accumulation_splits_agree(tmp_path, runs):
    """4 x 1, 2 x 2 and 1 x 4 use the same samples in the same steps, so they differ only by float32 rounding."""
    data = write_data(tmp_path / "d.jsonl", samples=10)
    folders = [
        runs.train(
            write_config(tmp_path / f"{size}", datasets=[{"path": str(data)}], micro_batch_size=size, adam_epsilon=1e-3,
                         gradient_accumulation_steps=4 // size, max_steps=6)
        )
        for size in (4, 2, 1)
    ]  # fmt: skip
    start = prepare(load_config(tmp_path / "4" / "config.yaml")).start
    updates = [np.concatenate([(t - start[n]).ravel() for n, t in read_adapter(run)[1].items()]) for run in folders]
    for other in updates[1:]:  # epsilon 1e-3 keeps Adam from turning rounding of tiny gradients into whole steps
        assert np.linalg.norm(other - updates[0]) < 1e-3 * np.linalg.norm(updates[0])


def test_loss_and_norm_are_means_over_the_targets_of_the_step(tmp_path, runs):
    """Steps of 2 x 2 over 7 samples: the last of an epoch holds 3 samples, one micro-batch of a single one.

    Against the float64 reference; the rate is too small to move the adapter.
    """
    data = write_data(tmp_path / "d.jsonl", samples=7)
    keys = {"adapter": str(ADAPTER), "lora_r": None, "lora_alpha": None, "gradient_accumulation_steps": 2}
    config = write_config(tmp_path, datasets=[{"path": str(data)}], max_steps=4, learning_rate=1e-9, **keys)
    trainer = runs.trainer(config)
    stream = trainer.run.batches.step_batches()
    steps = [next(stream) for _ in range(4)]
    assert trainer.train() == 0
    assert [len(s.micro_batches[-1].target_ids) for s in steps] != [0] * 4
    assert sum(b.samples for b in steps[1].micro_batches) == 3
    model = reference_model(open_checkpoint(MODEL), trainer.run.start, trainer.run.lora.alpha / trainer.run.lora.r)
    logged = [r for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "grad_norm" in r]
    for step, record in zip(steps, logged, strict=True):
        loss, grads = step_gradients(model, step.micro_batches)
        assert record["loss"] == pytest.approx(loss, rel=1e-5)  # float32 against float64
        assert record["grad_norm"] == pytest.approx(grad_norm(grads.values()), rel=1e-4)


def test_the_rate_follows_the_schedule(tmp_path, runs):
    folder = runs.train(write_config(tmp_path, max_steps=6, warmup_steps=2, lr_scheduler="linear"))
    rates = [r["learning_rate"] for r in read_metrics(folder / "metrics.jsonl") if "learning_rate" in r]
    assert rates == [Schedule("linear", 1e-2, 6, 2).lr(step) for step in range(6)]


def test_epochs_become_steps(tmp_path):
    data = write_data(tmp_path / "d.jsonl", samples=7)
    for epochs, steps in ((1, 2), (3, 6), (1.5, 3), (0.2, 1)):
        config = write_config(tmp_path, datasets=[{"path": str(data)}], max_steps=None, num_epochs=epochs,
                              gradient_accumulation_steps=2)  # fmt: skip
        assert prepare(load_config(config)).schedule.total_steps == steps


@pytest.mark.parametrize(
    ("keys", "log", "evaluate", "save"),
    [
        ({}, 10, None, 100),
        ({"logging_steps": 0.05, "eval_steps": 0.21, "save_steps": 7}, 1, 4, 7),  # transformers: ceil(0.21 * 18) = 4
        ({"evals_per_epoch": 4, "saves_per_epoch": 1}, 10, 2, 6),  # of an epoch of 6 steps: ceil(6 / 4)
        ({"evals_per_epoch": 100, "saves_per_epoch": 5, "save_steps": 3}, 10, 1, 2),
    ],
)
def test_intervals_are_steps_fractions_or_per_epoch(keys, log, evaluate, save):
    config = TrainConfig(base_model="m", datasets=[{"path": "d"}], val_set_size=0.1, **keys)
    assert intervals_of(config, total=18, epoch=6) == Intervals(log, evaluate, save)


def test_evaluations_per_epoch(tmp_path, runs):
    data = write_data(tmp_path / "d.jsonl", samples=10)
    keys = {"val_set_size": 2, "evals_per_epoch": 2, "saves_per_epoch": 1, "max_steps": None, "num_epochs": 2}
    folder = runs.train(write_config(tmp_path, datasets=[{"path": str(data)}], **keys))
    evaluated = [r["step"] for r in read_metrics(folder / "metrics.jsonl") if "eval_loss" in r]
    assert evaluated == [2, 4, 6, 8]  # 8 samples, 2 a step: 4 steps an epoch
    assert (folder / "checkpoint-4").is_dir() and (folder / "checkpoint-8").is_dir()


class Counting(Trainer):
    """Counts the live GPU objects after every step, and notes whether its capacity was new."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen, self.counts = set(), []

    def _step(self, batch):
        super()._step(batch)
        capacities = {b.capacity for b in batch.micro_batches}
        counts = {k: v["count"] for k, v in wgpu.diagnostics.object_counts.get_dict().items() if k != "total"}
        self.counts.append((bool(capacities - self.seen), counts))
        self.seen |= capacities


def test_no_gpu_object_is_created_after_the_first_step_of_a_capacity(tmp_path, runs):
    data = write_data(tmp_path / "d.jsonl", samples=12, longest=30)
    config = write_config(tmp_path, datasets=[{"path": str(data)}], max_steps=30, micro_batch_size=3,
                          gradient_accumulation_steps=2, logging_steps=4)  # fmt: skip
    trainer = runs.trainer(config, kind=Counting)
    assert trainer.train() == 0
    assert len(trainer.seen) > 1
    for (_, before), (new, after) in zip(trainer.counts[1:], trainer.counts[2:], strict=False):
        assert new or before == after


def test_micro_batches_prepared_ahead_are_not_consumed(tmp_path, runs):
    """A checkpoint counts as consumed what finished steps used, whatever the thread has read ahead."""
    config = write_config(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    trainer = runs.trainer(config)
    stream = trainer.run.batches.step_batches()
    expected = [next(stream).position for _ in range(2)][-1]
    assert trainer.train() == 0
    assert trainer.state.data == expected


# Held-out data


def test_evaluation_best_checkpoint_and_patience(tmp_path, runs, capsys):
    """Training on random tokens makes other random tokens less likely: the best comes early, then patience ends."""
    data, held_out = write_data(tmp_path / "d.jsonl"), write_data(tmp_path / "v.jsonl", samples=3, seed=9)
    config = write_config(
        tmp_path, datasets=[{"path": str(data)}], test_datasets=[{"path": str(held_out)}], eval_steps=3, max_steps=120,
        early_stopping_patience=2, save_steps=50, save_total_limit=1, learning_rate=2e-2, logging_steps=50,
    )  # fmt: skip
    trainer = runs.trainer(config)
    assert trainer.train() == 0
    evaluations = [r for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "eval_loss" in r]
    best = min(evaluations, key=lambda r: r["eval_loss"])
    assert trainer.state.best == {"step": best["step"], "loss": best["eval_loss"]}
    assert evaluations[-1]["step"] == best["step"] + 6 == trainer.state.step < 120
    assert {p.name for p in (tmp_path / "out").glob("checkpoint-*")} == {
        f"checkpoint-{best['step']}", f"checkpoint-{evaluations[-1]['step']}",
    }  # fmt: skip
    assert best["eval_perplexity"] == pytest.approx(math.exp(best["eval_loss"]))
    again = evaluate_source(trainer.engine, trainer.run.data.validation)
    assert again.loss == evaluations[-1]["eval_loss"]
    step, out = trainer.state.step, capsys.readouterr().out
    early = f"stopped early after step {step} of 120: 2 evaluations in a row"
    assert f"{step} steps, " in out and f"\n{early}" in out
    assert f"adapter: {tmp_path / 'out'} (of step {step}; the best one is in checkpoint-{best['step']})" in out
    runs.train(config, "auto")
    assert f"already finished: {early}" in capsys.readouterr().out


def test_without_eval_steps_each_epoch_ends_with_an_evaluation_and_a_checkpoint(tmp_path, runs):
    """Epochs of 4 steps; patience counts evaluations; the base is measured before step 1, as with eval_steps."""
    data, held_out = write_data(tmp_path / "d.jsonl"), write_data(tmp_path / "v.jsonl", samples=3, seed=9)
    sets = {"datasets": [{"path": str(data)}], "test_datasets": [{"path": str(held_out)}]}
    config = write_config(tmp_path, **sets, max_steps=None, num_epochs=2.5, save_total_limit=9, learning_rate=1e-3)
    folder = runs.train(config)
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in records if "eval_loss" in r] == [4, 8, 10] and "base_eval_loss" in records[1]
    assert {p.name for p in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8", "checkpoint-10"}
    plan = records[0]["plan"]["data"]
    tokens = [sum(len(json.loads(line)["input_ids"]) for line in path.open()) for path in (data, held_out)]
    assert plan.startswith(f"8 samples, {tokens[0]:,} tokens (")
    assert plan.endswith(f"; 3 samples, {tokens[1]:,} tokens held out, evaluated after each epoch")
    config = write_config(tmp_path, **sets, max_steps=None, num_epochs=30, early_stopping_patience=2,
                          learning_rate=2e-2, output_dir=str(tmp_path / "early"))  # fmt: skip
    state = (trainer := runs.trainer(config)).state
    assert trainer.train() == 0 and state.step == state.best["step"] + 8 < 120


def test_a_run_that_diverges_says_so_without_held_out_data(tmp_path, runs, capsys):
    folder = runs.train(write_config(tmp_path, learning_rate=10.0, max_steps=2))
    logged, out = losses(folder), capsys.readouterr().out
    assert f"\nthe training loss rose, from {logged[0]:.4f} in the first tenth of the run to {logged[-1]:.4f}" in out
    runs.train(write_config(tmp_path / "good"))
    assert "rose" not in capsys.readouterr().out


def test_early_stopping_on_losses_that_are_not_finite_fails(tmp_path, runs, monkeypatch):
    """Exit code 1, also when it is resumed; the adapter is saved."""
    result = {True: Evaluation(math.nan, 10), False: Evaluation(3.0, 10)}  # with the adapter, and without
    monkeypatch.setattr(evaluator, "evaluate_source", lambda engine, source, adapter, advance: result[adapter])
    keys = {"val_set_size": 2, "eval_steps": 1, "early_stopping_patience": 2, "max_steps": 9}
    for resume in (None, "auto"):
        trainer = runs.trainer(write_config(tmp_path, **keys), resume)
        with pytest.raises(CheckFailed, match="step 2: the held-out loss is not finite, so early stopping had nothing"):
            trainer.train()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_warmup_longer_than_the_epochs_is_refused(tmp_path):
    """8 samples in micro-batches of 2: an epoch has 4 steps."""
    keys = {"max_steps": None, "num_epochs": 2, "warmup_steps": 9}
    with pytest.raises(UserError, match="warmup_steps 9 is more than the 8 steps of this run"):
        prepare(load_config(write_config(tmp_path, **keys)))
    prepare(load_config(write_config(tmp_path, **(keys | {"warmup_steps": 8}))))


def test_a_best_loss_that_is_worse_than_the_base_models_is_marked(tmp_path, runs, capsys):
    runs.train(write_config(tmp_path, val_set_size=3, eval_steps=2, max_steps=2, learning_rate=5.0))
    out, err = capsys.readouterr()
    base = re.search(r"before: held-out loss (\S+)", err)[1]
    assert f", the best, not better than the {base} before training\n" in err
    assert f"at step 2, not better than the {base} before training: " in out and "(of step 2, the best)" in out


def test_a_held_out_part_is_not_trained_on(tmp_path, runs):
    trainer = runs.trainer(write_config(tmp_path, val_set_size=3, eval_steps=2, max_steps=2))
    held_out = trainer.run.data.validation
    assert len(held_out) == 3 and sum(len(s) for s in trainer.run.data.train) == 5
    assert trainer.train() == 0
    assert [r["eval_tokens"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "eval_tokens" in r] == [
        sum(held_out[i].targets for i in range(3))
    ]


# Without training


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys, train_main):
    config = write_config(tmp_path)
    assert train_main([str(config), "--dry-run", "--set", "micro_batch_size=3"]) == 0
    out = capsys.readouterr().out
    for words in ("llvmpipe", "max-storage-buffer-binding-size", "trainable parameters", "3 samples each", "MiB"):
        assert words in out
    assert not (tmp_path / "out").exists()


def test_the_plan_says_how_to_keep_dropped_samples(tmp_path, capsys, train_main):
    config = write_config(tmp_path, sequence_len=8)
    assert train_main([str(config), "--dry-run"]) == 0
    words = " dropped (longer than sequence_len 8: raise it, or set excess_length_strategy: truncate)"
    assert words in capsys.readouterr().out
    write_data(tmp_path / "data.jsonl").write_text(
        json.dumps({"input_ids": [5] * 9, "labels": [-100] * 8 + [5]}) + "\n" + json.dumps({"input_ids": [5, 6]}) + "\n"
    )
    assert train_main([str(config), "--dry-run", "--set", "excess_length_strategy=truncate"]) == 0
    words = ", 1 dropped (no target token in their first 8 tokens: raise sequence_len)"
    assert words in capsys.readouterr().out


def test_preview_as_json_lines(tmp_path, capsys, train_main):
    """A model folder without weights is enough for a preview."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    config = write_config(tmp_path, base_model=str(model))
    assert train_main([str(config), "--preview", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["line"] for line in lines[:2]] == [1, 2]
    assert lines[0]["labels"][:2] == [IGNORE, IGNORE] and lines[0]["labels"][2:] == lines[0]["input_ids"][2:]
    assert lines[2]["samples"] == 8 and not (tmp_path / "out").exists()


def test_the_schema_knows_every_key(capsys, train_main):
    assert train_main(["--schema"]) == 0
    assert {"base_model", "lora_r", "max_dispatch_ms"} <= json.loads(capsys.readouterr().out)["properties"].keys()


def test_set_overrides_a_key(tmp_path, train_main):
    config = write_config(tmp_path)
    assert train_main([str(config), "--set", "max_steps=1", "--set", "learning_rate=1e-3"]) == 0
    resolved = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert resolved["max_steps"] == 1 and resolved["learning_rate"] == 1e-3


def test_bitnet_trains_too(tmp_path, runs):
    config = write_config(tmp_path, base_model=str(GOLDEN / "bitnet_packed"), max_steps=12, micro_batch_size=8)
    folder = runs.train(config)
    assert losses(folder)[-1] < losses(folder)[0]


def test_sample_prompts_are_answered_at_evaluations(tmp_path, runs):
    """The answers are the greedy tokens of that step's adapter, as computed by the engine."""
    model = byte_model(tmp_path / "model")
    config = write_config(tmp_path, base_model=str(model), eval_steps=2, max_steps=4, sample_prompts=["hello", "ab"])
    trainer = runs.trainer(config)
    assert trainer.train() == 0
    logged = [r for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "samples" in r]
    assert [r["step"] for r in logged] == [2, 4]
    assert [s["prompt"] for s in logged[-1]["samples"]] == ["hello", "ab"]
    tokenizer = open_checkpoint(model).tokenizer()
    ids = tokenizer.encode("hello")
    while len(ids) < 5 + 8:
        sample = Sample(np.array(ids, np.int32), np.array(ids, np.int32))
        ids.append(int(trainer.engine.logits(flatten([sample], 16), np.array([len(ids) - 1])).argmax()))
    assert logged[-1]["samples"][0]["text"].startswith(tokenizer.decode(ids[5:], skip_special=True))


def test_sample_prompts_without_a_tokenizer_are_refused(tmp_path, capsys, train_main):
    config = write_config(tmp_path, eval_steps=2, sample_prompts=["hello"])
    assert train_main([str(config)]) == 2
    assert "sample_prompts need the model's tokenizer" in capsys.readouterr().err


def test_sample_prompts_stay_within_the_context(tmp_path, runs, capsys, train_main):
    """A prompt of 155 tokens leaves 5 of a model's 160 positions for its answer, whose last token needs none."""
    model = byte_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 160}
    (model / "config.json").write_text(json.dumps(config))
    keys = {"base_model": str(model), "eval_steps": 2, "max_steps": 2}
    trainer = runs.trainer(write_config(tmp_path, sample_prompts=["a" * 155, "ab"], **keys))
    assert trainer.samples.answerer.decoder(1, 1).context == 160
    assert trainer.train() == 0
    (logged,) = (r["samples"] for r in read_metrics(tmp_path / "out" / "metrics.jsonl") if "samples" in r)
    assert len(logged[0]["text"]) == 6
    keys["output_dir"] = str(tmp_path / "other")
    assert train_main([str(write_config(tmp_path, sample_prompts=["a" * 160], **keys))]) == 2
    assert "one of sample_prompts has 160 tokens, the model's context is 160: shorten it" in capsys.readouterr().err


def test_a_sample_that_is_not_finite_says_so_and_does_not_stop_the_next(tmp_path, runs):
    model = byte_model(tmp_path / "model")
    trainer = runs.trainer(write_config(tmp_path, base_model=str(model), eval_steps=2, sample_prompts=["hello"]))
    engine, samples = trainer.engine, trainer.samples
    healthy, params = samples.answers(), engine.device.read(engine.adapter.params)
    engine.device.write(engine.adapter.params, np.full_like(params, np.nan))
    (sick,) = samples.answers()
    assert sick["text"].startswith("(no answer: the model computed a value that is not finite, first in layers.0")
    engine.device.write(engine.adapter.params, params)
    assert samples.answers() == healthy
