"""Streams that are closed, full, or a pipe without a reader: no traceback, no lost run, a proper exit code."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from golden_case import GOLDEN
from tiny_run import write_config

from lorawgpu.train.checkpoint import newest_checkpoint
from lorawgpu.util.streams import Guarded

MODEL = GOLDEN / "llama_dense"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")


def shell(command: str, **more) -> tuple[int, str]:
    """Exit code of the first command of a pipeline, and its stderr if that is not redirected."""
    script = f'lorawgpu() {{ {shlex.quote(sys.executable)} -m lorawgpu.cli "$@"; }}; {command}; exit ${{PIPESTATUS[0]}}'
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, env=env, timeout=120, **more)
    return done.returncode, done.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the config of a short run and its data."""
    write_config(tmp_path, max_steps=3, save_steps=1)
    return tmp_path


COMMANDS = {
    "schema": "train --schema",
    "preview": "train {t}/config.yaml --preview 3",
    "help": "train --help",
    "listing": "--help",
    "evaluate": f"evaluate --model {MODEL} --data {{t}}/data.jsonl",
    "export": f"export --adapter {MODEL}/adapter_init --to peft --out {{t}}/exported",
    "verify": f"verify {MODEL} --json",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_is_gone_is_not_an_error(folder, command):
    code, err = shell(f"lorawgpu {COMMANDS[command].format(t=folder)} | true")
    assert code == 0 and "Exception ignored" not in err and "error" not in err and "Traceback" not in err


@FULL
@pytest.mark.parametrize("command", ["schema", "help", "evaluate"])
def test_a_full_stdout_is_named(folder, command):
    code, err = shell(f"lorawgpu {COMMANDS[command].format(t=folder)} > /dev/full")
    assert err.count("error: standard output: No space left on device") == 1
    assert code == 2 and "Exception ignored" not in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["listing", "evaluate", "export"])
def test_closed_streams_do_not_matter(folder, command):
    assert shell(f"lorawgpu {COMMANDS[command].format(t=folder)} <&- >&- 2>&-") == (0, "")


LOST = ["2>&1 | true", ">&- 2>&- <&-", "> /dev/full", "2> /dev/full"]


@pytest.mark.parametrize("where", LOST)
def test_a_run_outlives_its_output(folder, where):
    if "/dev/full" in where and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    code, err = shell(f"lorawgpu train {folder}/config.yaml {where}")
    assert code == 0 and "Exception ignored" not in err and "Traceback" not in err
    assert (folder / "out" / "adapter_model.safetensors").exists()
    assert newest_checkpoint(folder / "out").name == "checkpoint-3"
    records = (
        (folder / "out" / "metrics.jsonl").read_text().splitlines()
    )  # nothing else was written into a file opened as number 2
    assert [json.loads(record)["step"] for record in records] == [0, 1, 2, 3, 3] and "finished" in records[-1]
    if where == "> /dev/full":
        assert "note: standard output: No space left on device; continuing without it" in err


def test_a_failure_still_has_its_exit_code(folder):
    (folder / "data.jsonl").write_text("{")
    for where in ("2>&-", "2> /dev/full"):
        assert shell(f"lorawgpu train {folder}/config.yaml --preview 1 {where}")[0] == 2


def test_a_nested_write_ends_nothing():
    class Busy(io.StringIO):
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    assert Guarded(Busy(), "standard error", lasting=True).write("SIGTERM") == 7
    with pytest.raises(RuntimeError):
        Guarded(Busy(), "standard output", lasting=False).write("SIGTERM")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_saves_and_exits(tmp_path, ignored):
    """SIGHUP comes twice, from the shell and the system; `ignored`: under nohup."""
    config = write_config(tmp_path, max_steps=60 if ignored else 100_000)
    command = [sys.executable, "-m", "lorawgpu.train", str(config)]
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL  # the tests themselves may run under nohup
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGHUP, handler))
    next(line for line in process.stderr if line.startswith("step "))
    process.stderr.close()  # the terminal is gone
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == (0 if ignored else 129)
    assert newest_checkpoint(tmp_path / "out") is not None
