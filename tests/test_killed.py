"""A run that is killed at any moment and resumed ends with the same bytes as an uninterrupted one."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from breadth import seeds
from test_resume import assert_same_run, everything, start
from tiny_run import write_config

from lorawgpu.train import __main__ as command
from lorawgpu.train.checkpoint import newest_checkpoint


def killed_and_resumed(config: Path, moments) -> int:
    """SIGKILL the run after each number of seconds of training, then let it finish; returns how many kills hit it."""
    kills = 0
    for seconds in moments:
        process = start(config)
        steps = (line for line in process.stderr if line.startswith("step "))
        if next(steps, None) is not None:  # training has begun: interrupting compilation proves nothing
            time.sleep(seconds)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    process = start(config)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return kills


@pytest.mark.long
def test_killed_and_resumed_is_bit_equal(tmp_path):
    """It saves at every step, so that kills hit saves too."""
    keys = {"save_steps": 1, "logging_steps": 1, "max_steps": 40}
    whole = everything(tmp_path, "whole", **keys)
    assert command.main([str(whole)]) == 0
    cut = everything(tmp_path, "cut", **keys)
    assert killed_and_resumed(cut, (0.3, 0.7, 1.0)) >= 2
    assert_same_run(tmp_path / "whole" / "out", tmp_path / "cut" / "out")


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds())
def test_killed_at_thirty_random_moments(tmp_path, seed):
    keys = {"save_steps": 1, "logging_steps": 1, "max_steps": 300}
    whole = everything(tmp_path, "whole", **keys)
    assert command.main([str(whole)]) == 0
    rng = random.Random(int(time.time()) + seed)
    cut = everything(tmp_path, "cut", **keys)
    assert killed_and_resumed(cut, [rng.uniform(0, 1.0) for _ in range(30)]) >= 25
    assert_same_run(tmp_path / "whole" / "out", tmp_path / "cut" / "out")


def test_ctrl_c_saves_and_exits(tmp_path):
    config = write_config(tmp_path, max_steps=100_000, logging_steps=1)
    process = start(config)
    next(line for line in process.stderr if line.startswith("step "))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGINT: finishing this step" in err and "Traceback" not in err
    assert newest_checkpoint(tmp_path / "out") is not None


def test_a_second_ctrl_c_exits_at_once():
    program = (
        "import signal\nfrom lorawgpu.train.interrupt import Interrupts\n"
        "with Interrupts(print):\n    signal.raise_signal(signal.SIGINT)\n    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT and "still here" not in done.stdout
