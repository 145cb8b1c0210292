"""Bad steps change nothing, are counted and named, and a bad adapter is never saved."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_case import GOLDEN
from tiny_run import MODEL, losses, write_config, write_data

from lorawgpu.data.batch_order import StepBatch
from lorawgpu.data.batching import MicroBatch
from lorawgpu.data.source_lines import describe_lines
from lorawgpu.errors import CheckFailed
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.trainer import Trainer

ADAPTER = MODEL / "adapter_init"  # B is not zero: every gradient is alive


class Poisoned(Trainer):
    """Before step `at` (from 1) one adapter tensor becomes non-finite; before step `healed` it is restored."""

    at, healed, value = 3, 5, math.nan

    def _step(self, batch):
        tensors = self.engine.tensors()
        name = next(n for n in tensors if "layers.1.mlp.gate_proj.lora_B" in n)
        if self.state.step + 1 == self.at:
            self.kept = {part: self.engine.tensors(part) for part in ("params", "m", "v")}
            tensors[name] = np.full_like(tensors[name], self.value)
            self.engine.load("params", tensors)
        if self.state.step + 1 == self.healed:
            for part in ("m", "v"):
                for name, tensor in self.engine.tensors(part).items():
                    assert np.array_equal(tensor, self.kept[part][name]), name
            self.engine.load("params", self.kept["params"])
        super()._step(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(tmp_path, runs, capsys, value):
    class PoisonedWith(Poisoned):
        pass

    PoisonedWith.value = value
    trainer = runs.trainer(write_config(tmp_path, max_steps=6, save_steps=100), kind=PoisonedWith)
    assert trainer.train() == 0
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    bad = [r for r in records if "bad_step" in r]
    assert [(r["step"], r["bad_steps"]) for r in bad] == [(3, 1), (4, 2)]
    assert all(r["bad_step"] == "layers.1.gate_up" for r in bad), bad
    assert [r["loss"] is None for r in records if "loss" in r] == [False, False, True, True, False, False]
    assert trainer.state.bad.bad_total == 2 and trainer.state.bad.bad_run == 0
    out, err = capsys.readouterr()
    assert "step 3: skipped, layers.1.gate_up is not finite" in err
    assert "2 steps were not finite" in out


class Never(Poisoned):
    healed = None


def lines_of(step: StepBatch, sets: list[dict]) -> str:
    """The lines whose tokens a step uses, looked up in the files."""
    used = set()
    for b in step.micro_batches:
        starts = np.flatnonzero(b.position[: b.tokens] == 0)[1:]
        used |= {tuple(ids.tolist()) for ids in np.split(b.ids[: b.tokens], starts)}
    records = [(s["path"], n, json.loads(r)) for s in sets for n, r in enumerate(Path(s["path"]).open(), 1)]
    return describe_lines((path, number) for path, number, record in records if tuple(record["input_ids"]) in used)


@pytest.mark.parametrize("packing", [False, True])
def test_too_many_bad_steps_end_the_run_with_advice(tmp_path, runs, capsys, packing):
    sets = [{"path": str(write_data(tmp_path / name, seed=n))} for n, name in enumerate(("a.jsonl", "b.jsonl"))]
    config = write_config(tmp_path, max_steps=20, max_bad_steps=2, save_steps=2, logging_steps=100, datasets=sets,
                          val_set_size=3, sample_packing=packing)  # fmt: skip
    trainer = runs.trainer(config, kind=Never)
    with pytest.raises(CheckFailed) as failed:
        trainer.train()
    message = str(failed.value)
    lines = [lines_of(step, sets) for step, _ in zip(trainer.run.batches.step_batches(), range(4), strict=False)]
    assert f"look at the data of that step: {lines[3]}. " in message
    assert f"step 3: skipped, layers.1.gate_up is not finite; data of this step: {lines[2]}" in capsys.readouterr().err
    for words in ("2 steps in a row", "layers.1.gate_up", "learning_rate (0.01)", "lora_alpha", "out/checkpoint-2;"):
        assert words in message
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_an_adapter_that_is_not_finite_is_never_saved(tmp_path, runs):
    """Neither when a checkpoint is due (step 4) nor at the end."""
    config = write_config(tmp_path, max_steps=5, max_bad_steps=9, save_steps=2)
    with pytest.raises(CheckFailed, match="not saved: .*gate_proj.lora_B.* last good checkpoint is .*out/checkpoint-2"):
        runs.train(config, kind=Never)
    assert [p.name for p in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-2"]


DESTROYED = [("llama_dense", None, 1e30)]  # BitNet's quantizer turns NaN into finite numbers: the logits look fine
DESTROYED += [
    ("bitnet_packed", [module], rate) for module in ("v_proj", "up_proj", "down_proj") for rate in (1e10, 1e30)
]


@pytest.mark.parametrize(("model", "modules", "rate"), DESTROYED)
@pytest.mark.parametrize("save_steps", [1, 3])
def test_a_destroyed_adapter_costs_no_good_checkpoint(tmp_path, runs, model, modules, rate, save_steps):
    """It is still finite, but useless. The earlier checkpoint survives, is named, and resumes."""
    keys = {"save_steps": save_steps, "save_total_limit": 1, "lr_scheduler": "constant", "max_bad_steps": 4}
    keys |= {"base_model": str(GOLDEN / model), "lora_target_modules": modules or "all-linear"}
    runs.train(write_config(tmp_path, max_steps=3, **keys))
    absurd = write_config(tmp_path, max_steps=30, **keys, learning_rate=rate)
    with pytest.raises(CheckFailed, match="out/checkpoint-3; --resume continues"):
        runs.train(absurd, "auto")
    assert [p.name for p in (tmp_path / "out").glob("*checkpoint*")] == ["checkpoint-3"]
    folder = runs.train(write_config(tmp_path, max_steps=8, **keys), "auto")
    assert (folder / "checkpoint-8").is_dir() and np.isfinite(losses(folder)[-1])


def test_a_destroyed_final_adapter_is_not_written(tmp_path, capsys, train_main):
    keys = {"base_model": str(GOLDEN / "bitnet_packed"), "lora_target_modules": ["v_proj"]}
    config = write_config(tmp_path, **keys, max_steps=1, learning_rate=1e30)
    assert train_main([str(config)]) == 1
    assert (
        "step 1 not saved: with its adapter, the model computes values that are not finite" in capsys.readouterr().err
    )
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


class Stumbling(Trainer):
    """Only steps 4 and 8 are not finite; the adapter is restored after each."""

    def _step(self, batch):
        kept = self.engine.tensors()
        if stumbles := self.state.step + 1 in (4, 8):
            self.engine.load("params", {name: np.full_like(tensor, math.nan) for name, tensor in kept.items()})
        real = self.engine.step

        def step(*args):
            targets = real(*args)
            if stumbles:
                self.engine.load("params", kept)
            return targets

        self.engine.step = step
        super()._step(batch)
        self.engine.step = real


def test_a_checkpoint_due_at_a_bad_step_is_saved_after_the_next_good_one(tmp_path, runs):
    folder = runs.train(write_config(tmp_path, max_steps=10, save_steps=4, save_total_limit=9), kind=Stumbling)
    assert sorted(int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")) == [5, 9, 10]


def test_an_absurd_rate_ends_with_exit_code_1(tmp_path, capsys, train_main):
    config = write_config(tmp_path, max_steps=30, learning_rate=1e30, max_bad_steps=4, weight_decay=1.0)
    assert train_main([str(config)]) == 1
    err = capsys.readouterr().err
    assert "error: 4 steps in a row were not finite" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_final_adapter_without_effect_fails(tmp_path, runs):
    """The rate is so small that B is lost in float32 rounding of the output: only the file changes."""
    with pytest.raises(CheckFailed, match="does not change the model's output.*checkpoint-2"):
        runs.train(write_config(tmp_path, max_steps=2, learning_rate=1e-30))


def test_a_final_adapter_that_never_moved_fails(tmp_path, runs):
    config = write_config(tmp_path, max_steps=2, learning_rate=1e-30, adapter=str(ADAPTER), lora_r=None,
                          lora_alpha=None)  # fmt: skip
    with pytest.raises(CheckFailed, match="equals the initial one"):
        runs.train(config)


def test_steps_without_a_target_are_skipped_and_counted(tmp_path, runs, capsys):
    trainer = runs.trainer(write_config(tmp_path, max_steps=4))
    real = trainer.run.batches.step_batches

    def step_batches(position=None):
        for number, step in enumerate(real(position)):
            yield replace(step, micro_batches=list(map(untargeted, step.micro_batches))) if number == 1 else step

    trainer.run.batches.step_batches = step_batches
    assert trainer.train() == 0
    assert trainer.state.skipped == 1
    assert "1 steps without a target were skipped" in capsys.readouterr().out


def untargeted(batch: MicroBatch) -> MicroBatch:
    return replace(batch, target_rows=batch.target_rows[:0], target_ids=batch.target_ids[:0])
