"""A run never overwrites files of another run or of the user."""

import shutil
from pathlib import Path

import pytest
from test_resume import stopping_at
from tiny_run import adapter_bytes, write_config

from lorawgpu.config.load import load_config
from lorawgpu.train.checkpoint import list_checkpoints
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.run_dir import MARK, why_refused


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def finished(tmp_path, runs):
    """The folder of a finished run whose checkpoints were removed."""
    folder = runs.train(write_config(tmp_path, max_steps=1))
    for checkpoint in list_checkpoints(folder):
        shutil.rmtree(checkpoint)
    return folder


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_finished_adapter_is_kept(tmp_path, finished, capsys, train_main, resume):
    before = tree(finished)
    assert train_main([str(tmp_path / "config.yaml"), *resume]) == 2
    err = capsys.readouterr().err
    assert "out already holds adapter_model.safetensors, adapter_config.json, metrics.jsonl, config.yaml" in err
    assert "choose another output_dir, or remove these files" in err and tree(finished) == before


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "config.yaml", "report.html"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_file_of_the_user_is_kept(tmp_path, capsys, train_main, name, resume):
    config = write_config(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("# mine\n")
    assert train_main([str(config), *resume]) == 2
    assert f"out already holds {name} of another run or of your own" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_text() == "# mine\n"


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_the_config_that_was_given_is_kept(tmp_path, capsys, train_main, resume):
    config = write_config(tmp_path, output_dir=str(tmp_path))
    before = config.read_bytes()
    assert train_main([str(config), *resume]) == 2
    assert "holds the config file of this run, which would be overwritten" in capsys.readouterr().err
    assert config.read_bytes() == before


def test_a_run_goes_on_from_its_own_config_which_stays(tmp_path, capsys, runs, train_main):
    runs.train(write_config(tmp_path, max_steps=1))
    own = tmp_path / "out" / "config.yaml"
    before = own.read_bytes()
    assert before.startswith(MARK.encode()) and load_config(own).max_steps == 1
    assert train_main([str(own), "--resume", "--set", "max_steps=2"]) == 0
    assert own.read_bytes() == before
    assert "is the config of this run and was not overwritten" in capsys.readouterr().err


def test_the_metrics_of_a_run_killed_early_are_kept(tmp_path, capsys, runs, train_main):
    config = write_config(tmp_path, max_steps=2)
    runs.trainer(config, kind=stopping_at(1)).train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    assert train_main([str(config)]) == 2
    assert "or restart that run with --resume" in capsys.readouterr().err
    assert train_main([str(config), "--resume"]) == 0
    assert "saved no checkpoint; renamed to metrics.1.jsonl" in capsys.readouterr().err
    assert (tmp_path / "out" / "metrics.1.jsonl").read_bytes() == before
    assert read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["step"] == 2


def test_a_dry_run_notes_that_the_run_would_be_refused(tmp_path, finished, capsys, train_main):
    before = adapter_bytes(finished)
    assert train_main([str(tmp_path / "config.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "note     the real run would be refused: " in out and "already holds adapter_model.safetensors" in out
    assert adapter_bytes(finished) == before


@pytest.mark.parametrize("kind", ["in a file", "a file", "a broken link"])
def test_a_folder_that_cannot_be_made_is_known_before_the_run(tmp_path, kind):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    folder = {"in a file": file / "a" / "b", "a file": file, "a broken link": link / "a"}[kind]
    reason = why_refused(folder, None, False)
    there = {"a broken link": f"{link} is a broken link"}.get(kind, f"{file} is a file")
    assert reason == f"output_dir {folder}: {there}, not a folder: choose another output_dir"


def test_a_folder_that_may_not_be_written_to_is_known_before_the_run(tmp_path, monkeypatch):
    """The tests may run as root, who may write anywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert f"{tmp_path} may not be written to" in why_refused(tmp_path / "a" / "b", None, False)


def test_an_empty_or_missing_folder_is_free(tmp_path):
    (tmp_path / "notes.txt").touch()
    assert (
        why_refused(tmp_path, tmp_path / "c.yaml", False) is None and why_refused(tmp_path / "no", None, False) is None
    )
