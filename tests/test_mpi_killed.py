"""Two ranks, one of which is killed at a random moment, again and again: the job ends at once, and loses nothing."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi_jobs import MPIEXEC, mpi_environment
from tiny_run import adapter_bytes, losses, write_config, write_data

from lorawgpu.train.checkpoint import newest_checkpoint

KILLS, STEPS, TIMEOUT = 20, 100, 30


def start(config: Path) -> subprocess.Popen:
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "lorawgpu.train", str(config), "--resume"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=mpi_environment(PYTHONUNBUFFERED="1"), **pipes)


def processes(job: subprocess.Popen) -> list[int]:
    """The process of each rank, as the plan says."""
    plan = next((line for line in job.stdout if line.startswith("ranks ")), "")
    found = [int(number) for number in re.findall(r"process (\d+)", plan)]
    assert len(found) == 2, job.communicate()
    return found


def saved_step(folder: Path) -> int:
    newest = newest_checkpoint(folder)
    return int(newest.name.rpartition("-")[2]) if newest else 0


def kill_one(config: Path, rng: random.Random) -> int:
    """Kill a random rank at a random moment of a step or of its save; returns the steps that the job lost."""
    job = start(config)
    pids = processes(job)
    steps = (int(match[1]) for line in job.stderr if (match := re.match(r"step (\d+)/", line)))
    reached = [next(steps) for _ in range(rng.randrange(1, 3))][-1]
    time.sleep(rng.uniform(0, 0.15))
    rank = rng.randrange(2)
    killed = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    _, err = job.communicate(timeout=TIMEOUT)
    assert job.returncode and time.monotonic() - killed < TIMEOUT
    assert re.search(rf"^error: rank {rank} on .* died", err, re.MULTILINE) and "Traceback" not in err, err
    return reached - saved_step(Path(config).parent / "out")


@pytest.mark.long
def test_twenty_kills_of_a_random_rank_lose_nothing(tmp_path):
    """Both checkpoint at each step, so that kills hit saves too. All is small, because each restart takes seconds."""
    data = write_data(tmp_path / "d.jsonl", samples=9, longest=14)
    keys = {"datasets": [{"path": str(data)}], "micro_batch_size": 1, "sequence_len": 16, "max_steps": STEPS}
    keys |= {"save_steps": 1, "dataset_prepared_path": str(tmp_path / "cache"), "lr_scheduler": "constant"}
    whole, cut = (write_config(tmp_path / name, **keys) for name in ("whole", "cut"))
    job = start(whole)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    rng = random.Random(int(time.time()))
    assert all(kill_one(cut, rng) <= 1 for _ in range(KILLS))  # the step that was being saved
    job = start(cut)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert losses(whole.parent / "out") == losses(cut.parent / "out")
    assert adapter_bytes(whole.parent / "out") == adapter_bytes(cut.parent / "out")
