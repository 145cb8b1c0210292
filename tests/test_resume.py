"""An interrupted run, resumed, ends with the bytes of the one that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tiny_run import MODEL, adapter_bytes, byte_model, write_config, write_data

from lorawgpu.chat import template as chat
from lorawgpu.errors import UserError
from lorawgpu.files.lock import only_run_in
from lorawgpu.files.run_folder import LOCK_FILE
from lorawgpu.train import __main__ as command
from lorawgpu.train.checkpoint import load_checkpoint, newest_checkpoint
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.resume import TrainerState
from lorawgpu.train.trainer import Trainer

STEPS = 9


def everything(tmp_path: Path, name: str, **keys) -> Path:
    """A config with all that has to be resumed: accumulation, dropout, shuffling, packing, schedule, weights."""
    data = [write_data(tmp_path / f"{n}.jsonl", samples=n, seed=n) for n in (19, 11)]
    sets = [{"path": str(data[0])}, {"path": str(data[1]), "weight": 0.5}]
    defaults = {
        "datasets": sets, "val_set_size": 2, "eval_steps": 2, "gradient_accumulation_steps": 2, "lora_dropout": 0.1,
        "sample_packing": True, "max_steps": STEPS, "lr_scheduler": "cosine", "warmup_steps": 2, "logging_steps": 2,
        "save_steps": 4, "weight_decay": 0.01,
    }  # fmt: skip
    return write_config(tmp_path / name, **(defaults | keys))


def stopping_at(step: int) -> type[Trainer]:
    """A trainer that gets SIGTERM while it works on that step."""

    class Stopped(Trainer):
        def _step(self, batch):
            if self.standing.step + 1 == step:
                signal.raise_signal(signal.SIGTERM)
            super()._step(batch)

    return Stopped


def assert_same_run(a: Path, b: Path):
    """Adapters, moments, data positions and metrics (but for what a clock or the session's memory account says)."""
    assert adapter_bytes(a) == adapter_bytes(b)
    one, two = (load_checkpoint(newest_checkpoint(folder)) for folder in (a, b))
    for snapshot in (one, two):
        for key in ("environment", "config", "data_files"):  # why bits may differ, and where the run and its data lie
            snapshot.state.pop(key)
    assert one.state == two.state
    for part in ("adapter", "m", "v"):
        for name, tensor in getattr(one, part).items():
            assert np.array_equal(tensor, getattr(two, part)[name]), (part, name)
    assert timeless(a) == timeless(b)


def timeless(folder: Path) -> list[dict]:
    other = ("tokens_per_s", "seconds", "tokens", "plan", "gpu_bytes")
    return [{k: v for k, v in r.items() if k not in other} for r in read_metrics(folder / "metrics.jsonl")]


def start(config: Path) -> subprocess.Popen:
    arguments = [sys.executable, "-m", "lorawgpu.train", str(config), "--resume"]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.fixture
def whole(tmp_path, runs) -> Path:
    return runs.train(everything(tmp_path, "whole"))


def test_stopped_anywhere_and_resumed_is_bit_equal(tmp_path, runs, whole, capsys):
    """Steps 2, 4 (where a checkpoint is due as well) and 7 are interrupted, one after another, in a single run."""
    config = everything(tmp_path, "cut")
    for step in (2, 4, 7):
        assert runs.trainer(config, "auto", stopping_at(step)).train() == 128 + signal.SIGTERM
        assert newest_checkpoint(tmp_path / "cut" / "out").name == f"checkpoint-{step}"
        err = capsys.readouterr().err
        assert "SIGTERM: finishing this step" in err and f"stopped after step {step}, saved" in err
        assert not (tmp_path / "cut" / "out" / "adapter_model.safetensors").exists()
    assert_same_run(whole, runs.train(config, "auto"))


def test_work_after_the_last_checkpoint_is_done_again_not_twice(tmp_path, runs, whole):
    """What a killed run wrote after its last checkpoint is cut from the metrics."""

    class Killed(Trainer):
        def _step(self, batch):
            if self.standing.step == 7:
                raise ZeroDivisionError  # nothing gets a chance to save
            super()._step(batch)

    config = everything(tmp_path, "cut")
    with pytest.raises(ZeroDivisionError):
        runs.train(config, kind=Killed)
    folder = tmp_path / "cut" / "out"
    assert newest_checkpoint(folder).name == "checkpoint-6"  # the best so far, or one that was due
    assert_same_run(whole, runs.train(config, "auto"))


def test_a_finished_run_resumes_to_itself_and_can_be_made_longer(tmp_path, runs, whole, capsys):
    config = everything(tmp_path, "whole")
    before = adapter_bytes(whole)
    assert runs.train(config, "auto") == whole and adapter_bytes(whole) == before
    assert f"finished already: step {STEPS} is the last one; raise max_steps or num_epochs" in capsys.readouterr().out
    longer = everything(tmp_path, "whole", max_steps=STEPS + 2)
    runs.train(longer, "auto")
    assert newest_checkpoint(whole).name == f"checkpoint-{STEPS + 2}"


def test_resume_from_a_named_checkpoint_into_another_folder(tmp_path, runs, whole):
    config = everything(tmp_path, "branch")
    folder = runs.train(config, str(whole / "checkpoint-8"))
    assert adapter_bytes(folder) == adapter_bytes(whole)
    with pytest.raises(UserError, match="checkpoint-9, which another course of training would mix with"):
        runs.trainer(everything(tmp_path, "whole"), str(whole / "checkpoint-8"))


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path, runs, whole):
    branch = runs.trainer(everything(tmp_path, "branch"), str(whole))
    assert branch.standing.step == STEPS
    itself = runs.trainer(everything(tmp_path, "whole"), str(whole))
    assert itself.standing.step == STEPS


def test_bad_step_counters_and_best_are_resumed(tmp_path, runs):
    trainer = runs.trainer(everything(tmp_path, "a"), kind=stopping_at(4))
    trainer.train()
    trainer.standing.bad = trainer.standing.bad.__class__(False, 1, 2, None, 4)
    trainer._save()
    resumed = runs.trainer(everything(tmp_path, "a"), "auto")
    assert resumed.standing == trainer.standing and resumed.standing.best["step"] in (2, 4)
    state = resumed.engine.steps_state()
    assert (state.bad_run, state.bad_total, state.steps) == (1, 2, 4)


def test_a_checkpoint_keeps_its_keys():
    """Those that were written before must resume."""
    stored = {
        "step": 5,
        "epoch": 1,
        "data": {"epoch": 1, "consumed": 7, "window_start": 4, "window_batches": 2, "mixing": [9, 3]},
        "skipped_windows": 1,
        "bad_steps": {"run": 0, "total": 2, "windows": 5},
        "best": None,
        "evaluations_since_best": 0,
        "metrics": {"loss": 2.5},
    }
    assert TrainerState.from_json(stored).to_json() == stored


def test_auto_without_a_checkpoint_starts_afresh_and_says_so(tmp_path, capsys, train_main):
    config = write_config(tmp_path, max_steps=1)
    for said in (True, False):
        assert train_main([str(config), "--resume"]) == 0
        assert (f"no checkpoint in {tmp_path / 'out'}: nothing to resume" in capsys.readouterr().out) == said
    assert adapter_bytes(tmp_path / "out")


def test_a_dry_run_where_a_run_is(tmp_path, capsys, runs, train_main):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with only_run_in(folder):
        assert train_main([str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    del before[folder]  # the lock came and went
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}.items()


def test_what_steers_and_was_changed_is_said(tmp_path, runs, capsys):
    runs.train(write_config(tmp_path, max_steps=1))
    runs.train(write_config(tmp_path, max_steps=2, learning_rate=1e-3), "auto")
    err = capsys.readouterr().err
    assert "note: this run will not end as the one before would have: learning_rate: the checkpoint has 0.01" in err


def test_a_template_that_tells_the_day_reads_the_data_as_on_the_first_day(tmp_path, runs, monkeypatch):
    """Else the data would differ tomorrow, and the run could not be resumed."""
    model = byte_model(tmp_path / "model")
    with open(tmp_path / "chat.jsonl", "w") as file:
        for word in ("one", "two", "three"):
            turns = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    template = "{{ strftime_now('%j %H %M %S') }}{% for m in messages %}{{ m.content }}~{% endfor %}"
    keys = {"base_model": str(model), "datasets": [{"path": str(tmp_path / "chat.jsonl")}], "sequence_len": 64}
    runs.train(write_config(tmp_path, chat_template_jinja=template, max_steps=1, **keys))

    class Tomorrow(datetime):
        @classmethod
        def now(cls):
            return datetime.now() + timedelta(days=1)

    monkeypatch.setattr(chat, "datetime", Tomorrow)
    trainer = runs.trainer(write_config(tmp_path, chat_template_jinja=template, max_steps=2, **keys), "auto")
    assert trainer.train() == 0
    assert runs.trainer(tmp_path / "config.yaml", "auto").run.text.template.now.date() == date.today()


# What is refused


def test_a_second_run_in_one_folder(tmp_path, capsys, train_main):
    config = write_config(tmp_path, max_steps=100_000, logging_steps=1)
    process = start(config)
    next(line for line in process.stderr if line.startswith("step "))
    assert train_main([str(config), "--resume"]) == 2
    assert f"{tmp_path / 'out'}: another run is using this folder" in capsys.readouterr().err
    process.kill()  # leaves the file of its lock
    process.communicate()
    assert (tmp_path / "out" / LOCK_FILE).exists()
    assert train_main([str(config), "--resume", "--set", "max_steps=1"]) == 0
    assert not (tmp_path / "out" / LOCK_FILE).exists()


def test_a_lock_leaves_no_folder_behind(tmp_path):
    with only_run_in(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
        with pytest.raises(UserError, match="another run is using"), only_run_in(tmp_path / "a" / "b"):
            pass
    assert not list(tmp_path.iterdir())


def test_an_output_dir_that_cannot_be_written(tmp_path, capsys, train_main):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name, words in (("link", "a broken link"), ("a" * 300, "File name too long"), ("file/x", "Not a directory")):
        assert train_main([str(write_config(tmp_path, output_dir=str(tmp_path / name)))]) == 2
        err = capsys.readouterr().err
        assert f"output_dir {tmp_path / name}: cannot be created or written to: " in err and words in err
        assert "; choose another output_dir" in err


def test_starting_afresh_where_a_run_is(tmp_path, capsys, runs, train_main):
    config = write_config(tmp_path, max_steps=1)
    runs.train(config)
    before = adapter_bytes(tmp_path / "out")
    assert train_main([str(config)]) == 2
    err = capsys.readouterr().err
    assert "already holds a run, up to checkpoint-1: continue it with --resume, or choose another output_dir" in err
    assert adapter_bytes(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lora_r": 8}, "lora_r: the checkpoint has 4, this run 8"),
        ({"seed": 1}, "seed: the checkpoint has 42, this run 1"),
        ({"micro_batch_size": 1}, "micro_batch_size: the checkpoint has 2, this run 1"),
        ({"base_model": "other"}, "model: the checkpoint has"),
        ({"datasets": "other"}, "data.jsonl is not among them now; {t}/other.jsonl is new among them"),
        ({"datasets": "changed"}, "data: {t}/data.jsonl has other content now"),
        ({"val_set_size": 2}, "data: the files are the same, but they are read otherwise"),
        ({"max_steps": 1}, "checkpoint-2: at step 2 already, and this run has 1 steps: raise max_steps or num_epochs"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path, capsys, runs, changed, words, train_main):
    runs.train(write_config(tmp_path, max_steps=2))
    if "base_model" in changed:
        changed = {"base_model": str(shutil.copytree(MODEL, tmp_path / "model"))}
        weights = tmp_path / "model" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-2] ^= 1
        weights.write_bytes(content)
    if changed == {"datasets": "changed"}:
        write_data(tmp_path / "data.jsonl", seed=5)
        changed = {"datasets": [{"path": str(tmp_path / "data.jsonl")}]}
    elif "datasets" in changed:
        changed = {"datasets": [{"path": str(write_data(tmp_path / "other.jsonl", seed=5))}]}
    assert train_main([str(write_config(tmp_path, **({"max_steps": 3} | changed))), "--resume"]) == 2
    err = capsys.readouterr().err
    assert words.format(t=tmp_path) in err and "Traceback" not in err
    assert "max_steps" in changed or "checkpoint-2: made by another run" in err


def test_a_garbled_state_is_refused(tmp_path, capsys, runs, train_main):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    file = folder / "checkpoint-1" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["data"]
    file.write_text(json.dumps(state))
    assert train_main([str(tmp_path / "config.yaml"), "--resume"]) == 2
    assert "its state lacks or garbles 'data'" in capsys.readouterr().err


def test_no_whole_checkpoint_is_refused(tmp_path, capsys, runs):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    (folder / "checkpoint-1" / "optimizer.safetensors").unlink()
    assert command.main([str(tmp_path / "config.yaml"), "--resume"]) == 2
    assert "none of its 1 checkpoints is whole" in capsys.readouterr().err
