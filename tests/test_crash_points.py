"""A run that dies before any of its file operations and is resumed ends with the bytes of an uninterrupted one."""

import hashlib
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
from breadth import seeds
from tiny_run import adapter_bytes, write_config

from lorawgpu.train.checkpoint import load_checkpoint, newest_checkpoint
from lorawgpu.train.metrics import MetricsLog, read_metrics
from lorawgpu.train.run_dir import claim

WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")


class Recorder:
    """Copies a folder before every operation that changes it, once for each state that it is in."""

    def __init__(self, folder: Path, copies: Path):
        self.folder, self.copies, self.seen, self.busy = folder, copies, {}, False
        self.operations = 0

    def hook(self, event: str, args: tuple) -> None:
        if self.busy or event not in (*WRITES, "open"):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if any(isinstance(arg, str | os.PathLike) and str(self.folder) in str(arg) for arg in args):
            self.record()

    def record(self) -> None:
        if self.busy or not self.folder.exists():
            return
        self.busy = True
        try:
            self.operations += 1
            state = self._state()
            if state not in self.seen:
                self.seen[state] = shutil.copytree(self.folder, self.copies / str(len(self.seen)), symlinks=True)
        finally:
            self.busy = False

    def _state(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            digest.update(f"{path.relative_to(self.folder)} {path.is_dir()}".encode())
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()


def calls_first(recorder: Recorder, function):
    def recorded(*args, **kwargs):
        recorder.record()
        return function(*args, **kwargs)

    return recorded


def measured(folder: Path) -> list[tuple]:
    """The losses of all steps, trained and held out."""
    records = read_metrics(folder / "metrics.jsonl")
    return [(r["step"], r.get("loss"), r.get("eval_loss")) for r in records if "loss" in r or "eval_loss" in r]


def settings(seed: int) -> dict:
    """Saves with evaluations, pruning and the best checkpoint."""
    keys = {"max_steps": 5, "save_steps": 1, "eval_steps": 2, "val_set_size": 2, "save_total_limit": 2,
            "lora_dropout": 0.1, "gradient_accumulation_steps": 2}  # fmt: skip
    choose = random.Random(seed).choice
    more = {"max_steps": choose([4, 5, 6]), "save_steps": choose([1, 2]), "eval_steps": choose([1, 2, 3]),
            "save_total_limit": choose([1, 2, 3]), "lora_dropout": choose([0.0, 0.1]), "seed": seed,
            "gradient_accumulation_steps": choose([1, 2]), "logging_steps": choose([1, 2])}  # fmt: skip
    return keys | (more if seed else {})


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds())
def test_a_crash_before_any_file_operation_loses_nothing(tmp_path, runs, monkeypatch, capsys, seed):
    """Every state that the run folder was in is resumed."""
    keys = settings(seed)
    whole = runs.train(write_config(tmp_path / "whole", **keys))
    config, folder = write_config(tmp_path / "cut", **keys), tmp_path / "cut" / "out"
    recorder = Recorder(folder, tmp_path / "copies")
    active = [True]
    sys.addaudithook(lambda event, args: recorder.hook(event, args) if active[0] else None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", calls_first(recorder, os.fsync))
        patch.setattr(MetricsLog, "write", calls_first(recorder, MetricsLog.write))
        runs.train(config)
    active[0] = False
    assert len(recorder.seen) > (25 if seed else 60), len(recorder.seen)
    logged = measured(whole)
    for number, copy in enumerate(recorder.seen.values()):
        shutil.rmtree(folder)
        shutil.copytree(copy, folder, symlinks=True)
        with claim(folder):  # as the command does
            runs.train(config, "auto")
        assert adapter_bytes(folder) == adapter_bytes(whole), number
        one, two = (load_checkpoint(newest_checkpoint(place)) for place in (folder, whole))
        assert all(one.m[n].tobytes() == two.m[n].tobytes() and one.v[n].tobytes() == two.v[n].tobytes() for n in one.m)
        assert measured(folder) == logged, number
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], number
    counts = f"{recorder.operations} file operations, {len(recorder.seen)} states of the run folder"
    with capsys.disabled():
        print(f"\nseed {seed}: {counts}, all resumed bit-equal")
