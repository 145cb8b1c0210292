"""What ranks agree on, and what ends a job: under a real launcher, without a GPU."""

import re
import sys
import time
from types import SimpleNamespace

import pytest
from mpi_jobs import HERE, mpiexec

from lorawgpu.config.schema import TrainConfig
from lorawgpu.errors import UserError
from lorawgpu.mpi.launch import connect, launched
from lorawgpu.train.setup import shares_of
from lorawgpu.train.shares import shares_for


def play(part: str, size: int = 2, **environment):
    """The process of a job whose ranks play a part of mpi_party.py, and the seconds that it took."""
    start = time.perf_counter()
    done = mpiexec("-n", size, sys.executable, HERE / "mpi_party.py", part, timeout=40, **environment)
    return done, time.perf_counter() - start


def own_lines(text: str) -> list[str]:
    """Lines that the ranks wrote, not the launcher."""
    return [line for line in text.splitlines() if re.match(r"error|rank|SIGTERM|note|Traceback", line)]


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_and_values_arrive_where_they_belong(size):
    done, _ = play("swap", size)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("swapped") == 1 and f"rank {size - 1} on " in done.stdout  # only rank 0 prints


def test_the_first_rank_prepares_what_the_others_find(tmp_path):
    done, _ = play("take_turns", 3, FOLDER=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "took turns\n"), done.stderr


@pytest.mark.parametrize(
    ("part", "code", "words"),
    [
        ("fail_at_start", 3, "error: rank 1 on .*: out of GPU memory"),
        ("fail_all", 2, "error: no such model$"),
        ("differ", 2, "error: the ranks differ in their config"),
        ("fail_later", 3, "error: rank 1 on .*: the device was lost"),
        ("bug", 1, "rank 1 on .*"),
    ],
)
def test_an_error_of_a_rank_ends_the_job_with_one_message(part, code, words):
    done, seconds = play(part)
    lines = own_lines(done.stderr)
    assert done.returncode == code and seconds < 20
    assert re.match(words, lines[0]) and len(lines) == (2 if part == "bug" else 1), done.stderr
    if part == "differ":
        assert re.search(r"learning_rate: rank 0 .* has 0.1, rank 1 .* has 0.2", done.stderr)
        assert "seed" not in done.stderr
    if part == "bug":
        assert "ZeroDivisionError: a bug" in done.stderr


@pytest.mark.parametrize(
    ("part", "words"), [("stop", "no sign of life from rank 1 on "), ("hang", "rank 1 on .* made no progress for 3 s")]
)
def test_silence_ends_the_job_within_the_timeout(part, words):
    done, seconds = play(part)
    (line,) = own_lines(done.stderr)
    assert re.search(words, line) and "The last good checkpoint is checkpoint-7" in line
    assert done.returncode == 3 and 3 < seconds < 15


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_is_named(size):
    done, seconds = play("die", size)
    (line,) = own_lines(done.stderr)
    assert re.match(
        "error: rank 1 on .*, process [0-9]+, llvmpipe died. The last good checkpoint is checkpoint-7", line
    )
    assert done.returncode and seconds < 12


def test_long_work_is_no_silence():
    done, _ = play("work_long")
    assert (done.returncode, done.stdout) == (0, "worked\n"), done.stderr


def test_a_signal_to_one_rank_saves_nothing_if_the_others_do_not_answer():
    done, seconds = play("signalled")
    assert own_lines(done.stderr) == ["SIGTERM: nothing was saved"] and done.returncode == 143 and seconds < 12


def test_after_an_agreement_ranks_may_take_their_time():
    done, _ = play("agree")
    assert (done.returncode, done.stdout) == (0, "agreed\n"), done.stderr


@pytest.mark.parametrize(
    ("seconds", "total", "shares"),
    [
        ([1.0, 1.0], 8, [4, 4]),
        ([1.0, 3.0], 8, [6, 2]),
        ([1.0, 100.0], 8, [7, 1]),
        ([2.0, 1.0, 1.0], 5, [1, 2, 2]),
        ([1.0, 1.0], 2, [1, 1]),
    ],
)
def test_shares_let_the_slowest_rank_end_early(seconds, total, shares):
    assert shares_for(seconds, total) == shares


def test_the_shares_of_a_config():
    config = {"base_model": "m", "datasets": [{"path": "d"}]}
    assert shares_of(TrainConfig(**config, gradient_accumulation_steps=3), 2) == (3, 3)
    assert shares_of(TrainConfig(**config, micro_batches_per_rank=[1, 4]), 2) == (1, 4)
    assert shares_of(TrainConfig(**config, micro_batches_per_rank="auto"), 3) == (1, 1, 1)
    with pytest.raises(UserError, match="has 2 entries; wanted 3"):
        shares_of(TrainConfig(**config, micro_batches_per_rank=[1, 4]), 3)


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 0),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"PMI_SIZE": "1"}, 0),
        ({"PMIX_RANK": "0"}, 2),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, 0),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 0),
    ],
)
def test_a_launcher_is_known_by_its_environment(environment, size):
    assert launched(environment) == size


def test_a_launcher_without_mpi4py_is_an_error(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match="an MPI launcher started this process, but mpi4py does not load"):
        connect()


def test_a_launcher_of_another_mpi_is_an_error(monkeypatch):
    """Each process then is a world of its own, and would overwrite what the others do."""
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1), Get_library_version=lambda: "MPICH Version: 5\n...")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=alone))
    with pytest.raises(UserError, match="the launcher started 4 processes, but each sees only itself: .*MPICH"):
        connect()
