"""Trackers that fail, and a disk that is full while metrics are written."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorawgpu.errors import UserError, explain
from lorawgpu.train.loggers import open_loggers, require_loggers
from lorawgpu.train.metrics import MetricsLog, read_metrics


class Tracker:
    """A stand-in for wandb and tensorboard.summary, one of whose calls fails."""

    def __init__(self, failing, error):
        self.failing, self.error, self.calls = failing, error, []
        self.init = self.Writer = lambda *args, **keys: self._call("init") or self
        self.log = self.add_scalar = lambda *args, **keys: self._call("log")
        self.finish = self.close = lambda: self._call("finish")

    def flush(self):
        pass

    def _call(self, name):
        self.calls.append(name)
        if name == self.failing:
            raise self.error


SETTINGS = dict.fromkeys(("wandb_entity", "wandb_run_id", "wandb_mode", "wandb_project", "wandb_name"))
ERRORS = [RuntimeError("no api key\nmore"), ConnectionError("refused"), SystemExit(1), OSError(28, "No space left")]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("failing", "calls"), [("init", 1), ("log", 2), ("finish", 4)])
def test_a_tracker_that_fails_is_one_note(tmp_path, capsys, monkeypatch, name, error, failing, calls):
    tracker = Tracker(failing, error)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", tracker)
    monkeypatch.setitem(sys.modules, "tensorboard", SimpleNamespace(summary=tracker))
    log = MetricsLog(tmp_path / "metrics.jsonl", loggers=open_loggers([name], tmp_path, SETTINGS))
    for step in (1, 2):
        log.write(step, loss=1.0)
    log.close()
    assert len(tracker.calls) == calls
    err = capsys.readouterr().err
    assert err.count("note:") == 1 and f"report_to: {name} failed (" in err and "the run goes on without it" in err
    assert "more" not in err
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_library_that_cannot_be_imported_is_found_before_the_run(monkeypatch):
    def broken(name):
        raise AttributeError("numpy has no attribute 'float_'")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(UserError, match="report_to: wandb cannot be imported .numpy has no attribute"):
        require_loggers(["wandb"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_names_the_file_and_what_helps(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)
    with pytest.raises(OSError) as caught:
        log.write(1, loss=1.0)
    assert explain(caught.value) == "/dev/full: No space left on device; free space on its disk"
    log.close()  # nothing is left in a buffer
    assert explain(OSError(2, "No such file", "a")) == "a: No such file"
