"""An interrupted and resumed run ends with the same bytes as an uninterrupted one."""

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
import safetensors.numpy
from tiny_run import MODEL, adapter_bytes, byte_model, write_config, write_data

from lorawgpu.chat import template as chat
from lorawgpu.errors import UserError
from lorawgpu.files.lock import only_run_in
from lorawgpu.files.run_folder import LOCK_FILE, SUMS_FILE
from lorawgpu.train import __main__ as command
from lorawgpu.train.checkpoint import FORMAT, _sums, load_checkpoint, newest_checkpoint
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.resume import TrainerState, load_snapshot
from lorawgpu.train.trainer import Trainer

STEPS = 9


def everything(tmp_path: Path, name: str, **keys) -> Path:
    """A config with everything that must resume: accumulation, dropout, shuffling, packing, schedule, weights."""
    data = [write_data(tmp_path / f"{n}.jsonl", samples=n, seed=n) for n in (19, 11)]
    sets = [{"path": str(data[0])}, {"path": str(data[1]), "weight": 0.5}]
    defaults = {
        "datasets": sets, "val_set_size": 2, "eval_steps": 2, "gradient_accumulation_steps": 2, "lora_dropout": 0.1,
        "sample_packing": True, "max_steps": STEPS, "lr_scheduler": "cosine", "warmup_steps": 2, "logging_steps": 2,
        "save_steps": 4, "weight_decay": 0.01,
    }  # fmt: skip
    return write_config(tmp_path / name, **(defaults | keys))


def stopping_at(step: int) -> type[Trainer]:
    """A trainer that receives SIGTERM in that step."""

    class Stopped(Trainer):
        def _step(self, batch):
            if self.state.step + 1 == step:
                signal.raise_signal(signal.SIGTERM)
            super()._step(batch)

    return Stopped


def assert_same_run(a: Path, b: Path):
    """Compare adapters, moments, data positions and metrics (except times and memory)."""
    assert adapter_bytes(a) == adapter_bytes(b)
    one, two = (load_checkpoint(newest_checkpoint(folder)) for folder in (a, b))
    for snapshot in (one, two):
        for key in ("environment", "config", "data_files"):  # why bits may differ, and where the run and its data are
            snapshot.state.pop(key)
        snapshot.state.pop("logged")  # a resumed run has a record of each start
    assert one.state == two.state
    for part in ("adapter", "m", "v"):
        for name, tensor in getattr(one, part).items():
            assert np.array_equal(tensor, getattr(two, part)[name]), (part, name)
    assert timeless(a) == timeless(b)


def timeless(folder: Path) -> list[dict]:
    other = ("tokens_per_s", "seconds", "paused_seconds", "data_wait_seconds", "tokens", "plan", "gpu_bytes", "started",
             "finished", "total_steps")  # fmt: skip
    records = [{k: v for k, v in r.items() if k not in other} for r in read_metrics(folder / "metrics.jsonl")]
    return [record for record in records if len(record) > 1]


def start(config: Path) -> subprocess.Popen:
    arguments = [sys.executable, "-m", "lorawgpu.train", str(config), "--resume"]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.fixture
def whole(tmp_path, runs) -> Path:
    return runs.train(everything(tmp_path, "whole"))


def test_a_run_stopped_anywhere_and_resumed_is_bit_equal(tmp_path, runs, whole, capsys):
    """One run is interrupted in steps 2, 4 (where a checkpoint is due as well) and 7."""
    config = everything(tmp_path, "cut")
    for step in (2, 4, 7):
        assert runs.trainer(config, "auto", stopping_at(step)).train() == 128 + signal.SIGTERM
        assert newest_checkpoint(tmp_path / "cut" / "out").name == f"checkpoint-{step}"
        err = capsys.readouterr().err
        assert "SIGTERM: finishing this step" in err and f"stopped after step {step}, saved" in err
        assert not (tmp_path / "cut" / "out" / "adapter_model.safetensors").exists()
    assert_same_run(whole, runs.train(config, "auto"))


def test_a_signal_ends_an_evaluation_which_a_resumed_run_does_again(tmp_path, runs, whole, capsys):
    """In the evaluation of the base model, after step 2 (the best so far) and after step 9, the last; submits are
    small, so that the evaluations wait for the device, and see the signal."""

    class Stopped(Trainer):
        when = 0

        def _evaluate_base(self):
            self.stop_at(0)
            super()._evaluate_base()

        def _evaluate(self):
            self.stop_at(self.state.step)
            return super()._evaluate()

        def stop_at(self, step):
            if self.state.step == step == self.when:
                signal.raise_signal(signal.SIGINT)

    config, folder = everything(tmp_path, "cut", max_dispatch_ms=1e-4), tmp_path / "cut" / "out"
    for step in (0, 2, STEPS):
        Stopped.when = step
        assert runs.trainer(config, "auto", Stopped).train() == 128 + signal.SIGINT
        err = capsys.readouterr().err
        assert ("stopped before step 1; --resume" if not step else f"stopped after step {step}, saved") in err
        assert [r for r in read_metrics(folder / "metrics.jsonl") if r["step"] == step and "eval_loss" in r] == []
        assert step == 0 or load_snapshot(newest_checkpoint(folder)).state["evaluation_due"]
    assert_same_run(whole, runs.train(config, "auto"))


def test_work_after_the_last_checkpoint_is_done_again_not_twice(tmp_path, runs, whole):
    """Metrics that a killed run wrote after its last checkpoint are removed."""

    class Killed(Trainer):
        def _step(self, batch):
            if self.state.step == 7:
                raise ZeroDivisionError  # no chance to save
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
    out, err = capsys.readouterr()
    assert f"already finished: step {STEPS} is the last one; raise max_steps or num_epochs" in out
    assert err.endswith("already finished; saving and checking its adapter again\n")
    longer = everything(tmp_path, "whole", max_steps=STEPS + 2)
    runs.train(longer, "auto")
    assert newest_checkpoint(whole).name == f"checkpoint-{STEPS + 2}"


def test_resume_from_a_named_checkpoint_into_another_folder(tmp_path, runs, whole):
    config = everything(tmp_path, "branch")
    folder = runs.train(config, str(whole / "checkpoint-8"))
    assert adapter_bytes(folder) == adapter_bytes(whole)
    with pytest.raises(UserError, match="already holds checkpoint-9, and two runs must not mix"):
        runs.trainer(everything(tmp_path, "whole"), str(whole / "checkpoint-8"))


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path, runs, whole):
    branch = runs.trainer(everything(tmp_path, "branch"), str(whole))
    assert branch.state.step == STEPS
    itself = runs.trainer(everything(tmp_path, "whole"), str(whole))
    assert itself.state.step == STEPS


def test_bad_step_counters_and_best_are_resumed(tmp_path, runs):
    trainer = runs.trainer(everything(tmp_path, "a"), kind=stopping_at(4))
    trainer.train()
    trainer.state.bad = trainer.state.bad.__class__(False, 1, 2, None, 4)
    trainer.progress = trainer._open_progress(trainer.run.folder)
    trainer._save()
    trainer.progress.close()
    resumed = runs.trainer(everything(tmp_path, "a"), "auto")
    assert resumed.state == trainer.state and resumed.state.best["step"] in (2, 4)
    state = resumed.engine.steps_state()
    assert (state.bad_run, state.bad_total, state.steps) == (1, 2, 4)


def test_a_checkpoint_keeps_its_keys():
    """A change of these keys is another FORMAT."""
    stored = {
        "format": FORMAT,
        "step": 5,
        "epoch": 1,
        "data": {"epoch": 1, "consumed": 7, "window_start": 4, "window_batches": 2, "mixing": [9, 3]},
        "skipped_windows": 1,
        "bad_steps": {"run": 0, "total": 2, "windows": 5},
        "best": None,
        "evaluations_since_best": 0,
        "evaluation_due": False,
        "metrics": {"loss": 2.5},
        "logged": 12,
    }
    assert TrainerState.from_json(stored).to_json() == stored


def test_metrics_that_were_lost_are_said(tmp_path, capsys, runs):
    """The file was emptied, or cut."""
    config = everything(tmp_path, "a")
    runs.trainer(config, kind=stopping_at(4)).train()
    file = tmp_path / "a" / "out" / "metrics.jsonl"
    whole, lines = file.read_bytes(), file.read_bytes().splitlines(keepends=True)
    capsys.readouterr()
    for kept in (0, 1, len(lines) - 1):
        file.write_bytes(b"".join(lines[:kept]))
        runs.trainer(config, "auto")._open_progress(file.parent).close()
        gone = f"{file}: {len(lines) - kept} of the {len(lines)} records up to step 4 are gone"
        assert gone in capsys.readouterr().err
    file.write_bytes(whole)
    runs.trainer(config, "auto")._open_progress(file.parent).close()
    assert "are gone" not in capsys.readouterr().err and file.read_bytes().startswith(whole)


def test_auto_without_a_checkpoint_starts_a_new_run_and_says_so(tmp_path, capsys, train_main):
    config = write_config(tmp_path, max_steps=1)
    for noted in (True, False):
        assert train_main([str(config), "--resume"]) == 0
        assert (f"no checkpoint in {tmp_path / 'out'}: starting at step 1" in capsys.readouterr().out) == noted
    assert adapter_bytes(tmp_path / "out")


def test_a_dry_run_in_the_folder_of_a_run(tmp_path, capsys, runs, train_main):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with only_run_in(folder):
        assert train_main([str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    del before[folder]  # the lock was created and removed in it
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}.items()


def test_a_changed_setting_that_steers_the_run_is_noted(tmp_path, runs, capsys):
    runs.train(write_config(tmp_path, max_steps=1))
    runs.train(write_config(tmp_path, max_steps=2, learning_rate=1e-3), "auto")
    err = capsys.readouterr().err
    assert "note: resumed run will not be bit-identical: learning_rate: the checkpoint has 0.01" in err


def test_a_template_with_the_date_renders_as_on_the_first_day(tmp_path, runs, monkeypatch):
    """Otherwise the data would differ tomorrow, and the run could not resume."""
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


# Refused


def test_a_second_run_in_one_folder(tmp_path, capsys, train_main):
    config = write_config(tmp_path, max_steps=100_000, logging_steps=1)
    process = start(config)
    next(line for line in process.stderr if line.startswith("step "))
    assert train_main([str(config), "--resume"]) == 2
    assert f"{tmp_path / 'out'}: another run is using this folder" in capsys.readouterr().err
    process.kill()  # leaves its lock file behind
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


def test_starting_a_new_run_in_the_folder_of_another(tmp_path, capsys, runs, train_main):
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
        ({"lora_model_dir": "other"}, "adapter: the checkpoint's run and this one continue from different adapters"),
        ({"datasets": "other"}, "data.jsonl is no longer used; {t}/other.jsonl is new"),
        ({"datasets": "changed"}, "data: {t}/data.jsonl has changed"),
        ({"val_set_size": 2}, "data: the same files, but processed differently"),
        (
            {"max_steps": 1},
            "checkpoint-2: already at step 2, but this run has only 1 steps: raise max_steps or num_epochs",
        ),
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
    if "lora_model_dir" in changed:
        shutil.copytree(tmp_path / "out" / "checkpoint-2", tmp_path / "other")
        changed = {"lora_model_dir": str(tmp_path / "other")}
    if changed == {"datasets": "changed"}:
        write_data(tmp_path / "data.jsonl", seed=5)
        changed = {"datasets": [{"path": str(tmp_path / "data.jsonl")}]}
    elif "datasets" in changed:
        changed = {"datasets": [{"path": str(write_data(tmp_path / "other.jsonl", seed=5))}]}
    assert train_main([str(write_config(tmp_path, **({"max_steps": 3} | changed))), "--resume"]) == 2
    err = capsys.readouterr().err
    assert words.format(t=tmp_path) in err and "Traceback" not in err
    assert "max_steps" in changed or "checkpoint-2: made by another run" in err


def test_a_malformed_state_is_refused(tmp_path, capsys, runs, train_main):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    file = folder / "checkpoint-1" / "trainer_state.json"
    state = json.loads(file.read_text())
    for key in ("data", "data_files"):
        file.write_text(json.dumps({k: value for k, value in state.items() if k != key}))
        (file.parent / SUMS_FILE).write_text(_sums(file.parent))
        assert train_main([str(tmp_path / "config.yaml"), "--resume"]) == 2
        assert f"'{key}' is missing or malformed in its state" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["alpha", "tensor"])
def test_a_sealed_checkpoint_of_another_adapter_is_refused(tmp_path, capsys, runs, train_main, changed):
    """Sums that fit prove that nothing was damaged, not that it is the adapter of this run."""
    place = runs.train(write_config(tmp_path, max_steps=1)) / "checkpoint-1"
    if changed == "alpha":
        file = place / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 999}))
    else:
        for name, prefix in (("adapter_model.safetensors", ""), ("optimizer.safetensors", "m.")):
            tensors = safetensors.numpy.load_file(place / name)
            gone = max(key for key in tensors if key.startswith(prefix))
            safetensors.numpy.save_file({k: t for k, t in tensors.items() if k != gone}, place / name, {"format": "pt"})
    (place / SUMS_FILE).write_text(_sums(place))
    assert train_main([str(write_config(tmp_path, max_steps=2)), "--resume", str(place)]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and ("other tensors, rank or alpha" in err or "does not fit the adapter" in err), err


def test_a_folder_without_a_complete_checkpoint_is_refused(tmp_path, capsys, runs):
    folder = runs.train(write_config(tmp_path, max_steps=1))
    (folder / "checkpoint-1" / "optimizer.safetensors").unlink()
    assert command.main([str(tmp_path / "config.yaml"), "--resume"]) == 2
    assert "none of its 1 checkpoints can be resumed" in capsys.readouterr().err


def test_a_checkpoint_of_another_format_is_refused_in_one_sentence(tmp_path, runs):
    folder = runs.train(write_config(tmp_path, max_steps=2, save_steps=1))
    state = folder / "checkpoint-1" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format": 2}))
    (folder / "checkpoint-1" / SUMS_FILE).unlink()  # came with format 3
    with pytest.raises(UserError, match="another version of lorawgpu wrote this checkpoint.*`adapter: .*checkpoint-1`"):
        load_snapshot(folder / "checkpoint-1")
