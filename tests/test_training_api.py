"""Training from Python: the bits of the command, records in place of files, what `on_step` may ask, where it runs."""

import io
import json
import signal
import threading

import pytest
import yaml
from tiny_run import MODEL, adapter_bytes, shared_main, write_config

import lorawgpu
from lorawgpu.config.load import load_config
from lorawgpu.errors import UserError
from lorawgpu.train.interrupt import Interrupted
from lorawgpu.train.metrics import read_metrics
from lorawgpu.util.progress import bar


@pytest.fixture
def train(monkeypatch, device, kernels):
    """`lorawgpu.train` on the session's device."""
    shared_main(monkeypatch, device, kernels)
    return lorawgpu.train


def keys(folder, **more):
    return yaml.safe_load(write_config(folder, **more).read_text())


def test_it_is_the_command_and_the_adapter_loads(tmp_path, train, train_main, device):
    """From a dict, with the records themselves; `lorawgpu.train` stays the package too."""
    config = write_config(tmp_path / "a", val_set_size=2, eval_steps=3)
    assert train_main([str(config)]) == 0
    records = [json.loads(line) for line in (tmp_path / "a" / "data.jsonl").read_text().splitlines()]
    given = keys(tmp_path / "b", val_set_size=2, eval_steps=3) | {"datasets": records, "output_dir": tmp_path / "c"}
    seen = []
    run = train(given, on_step=lambda metrics: seen.append(dict(metrics)))
    assert adapter_bytes(run.folder) == adapter_bytes(tmp_path / "a" / "out") and given["datasets"] == records
    assert run.metrics == read_metrics(tmp_path / "c" / "metrics.jsonl") and (run.folder / "report.html").exists()
    logged = [r for r in run.metrics if "learning_rate" in r]
    assert [m["loss"] for m in seen] == [r["loss"] for r in logged] and seen[0]["total_steps"] == 6
    assert [m["step"] for m in seen if "eval_loss" in m] == [3, 6] and seen[2]["grad_norm"] == logged[2]["grad_norm"]
    ids = [5, 6, 7]
    with_adapter = lorawgpu.load(MODEL, run.adapter, device).logits(ids)
    assert (with_adapter != lorawgpu.load(MODEL, device=device).logits(ids)).any()
    assert lorawgpu.train.trainer and load_config(run.folder / "config.yaml").datasets[0].path.endswith(".jsonl")


def test_on_step_saves_stops_and_the_run_goes_on_bit_for_bit(tmp_path, train, capsys):
    whole = train(keys(tmp_path / "whole", logging_steps=4))
    cut = keys(tmp_path / "cut", logging_steps=4, save_steps=100)
    run = train(cut, on_step=lambda m: {2: "save", 4: "stop"}.get(m["step"]))
    assert sorted(p.name for p in run.folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert "stopped after step 4, as asked" in capsys.readouterr().out and adapter_bytes(run.adapter)
    with pytest.raises(UserError, match="--resume"):
        train(cut)
    assert adapter_bytes(train(cut, resume=True).folder) == adapter_bytes(whole.folder)


def test_what_on_step_raises_is_raised_when_all_is_saved(tmp_path, train):
    def broken(metrics):
        if metrics["step"] == 3:
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        train(keys(tmp_path), on_step=broken)
    assert (tmp_path / "out" / "checkpoint-3").is_dir() and not (tmp_path / "out" / "adapter_config.json").exists()
    with pytest.raises(UserError, match="on_step returned 'halt'; wanted"):
        train(keys(tmp_path), on_step=lambda metrics: "halt", resume=True)
    assert (tmp_path / "out" / "checkpoint-4").is_dir()


def test_a_signal_saves_and_is_a_keyboard_interrupt(tmp_path, train):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="SIGINT, after saving") as caught:
        train(keys(tmp_path), on_step=lambda m: signal.raise_signal(signal.SIGINT) if m["step"] == 2 else None)
    assert isinstance(caught.value, Interrupted) and (tmp_path / "out" / "checkpoint-2").is_dir()
    assert signal.getsignal(signal.SIGINT) is before


def test_it_trains_outside_the_main_thread(tmp_path, train):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(keys(tmp_path, max_steps=1))))
    thread.start()
    thread.join()
    assert found and adapter_bytes(found[0].adapter)


class Output(io.StringIO):
    """As a notebook's: no terminal."""


@pytest.mark.parametrize(("module", "shown"), [("ipykernel.iostream", True), ("io", False)])
def test_a_notebook_shows_the_bar(monkeypatch, module, shown):
    monkeypatch.setattr(Output, "__module__", module)
    stream = Output()
    with bar(stream, total=2) as steps:
        steps.update()
    assert ("\r" in stream.getvalue()) == shown


BASE, TEXTS = {"base_model": str(MODEL)}, {"datasets": [{"text": "a"}]}
WRONG = {
    "no dict": (3, "config is 3; wanted the path of a YAML file, or a dict of its keys"),
    "an unknown key": (BASE | {"datasets": [{"text": "a"}], "lora_rr": 4}, "nearest one is 'lora_r'"),
    "a key that is no string": (
        {1: 2, "base_model": str(MODEL), "datasets": [{"text": "a"}]},
        "config: 1: unknown key",
    ),
    "no file": (BASE | {"datasets": [{"path": "chats.jsonl"}]}, "'chats.jsonl' does not exist"),
    "a name for a list": (BASE | {"datasets": ["a.jsonl"]}, "wanted `- path: a.jsonl`"),
    "a number as record": (BASE | {"datasets": [{"path": [3]}]}, "datasets.0.path, record 1: got 3"),
    "no records": (BASE | {"datasets": [{"path": []}]}, "datasets.0.path is an empty list"),
    "not JSON": (BASE | {"datasets": [{"text": {1, 2}}]}, "datasets, record 1: not JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_message(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    config, words = WRONG[case]
    with pytest.raises(UserError) as caught:
        lorawgpu.train(config)
    assert words in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: .*; set dataset_prepared_path"):
        lorawgpu.train(BASE | TEXTS | {"dataset_prepared_path": tmp_path / "file"})
    with pytest.raises(UserError, match="on_step is 3; wanted a function"):
        lorawgpu.train({}, on_step=3)


def test_texts_and_tables_are_records_too(tmp_path, monkeypatch):
    """Of any kind of list; the file is named after its content, so that a resumed run finds the same."""
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path))
    texts, rows = ["one", "two"], ({"text": t} for t in ("one", "two"))
    a, b = (load_config(BASE | {"datasets": d}) for d in ([{"path": texts, "weight": 2}], rows))
    assert a.datasets[0].path == b.datasets[0].path and a.datasets[0].weight == 2
    assert [json.loads(line) for line in open(b.datasets[0].path)] == [{"text": "one"}, {"text": "two"}]
