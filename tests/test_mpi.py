"""Jobs of several processes under a real launcher: the mathematics of one process, the same adapter on every rank."""

import sys
from pathlib import Path

import mpi_rank
import numpy as np
import pytest
from gradcheck import relative_error
from mpi_jobs import HERE, mpiexec
from tiny_run import write_config, write_data


def ranks_of(config: Path, shares: list[int]) -> list[dict]:
    """What each rank found: see mpi_rank.work."""
    size = len(shares)
    done = mpiexec("-n", size, sys.executable, HERE / "mpi_rank.py", config, config.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [dict(np.load(config.parent / f"rank{rank}.npz")) for rank in range(size)]


@pytest.mark.parametrize("shares", [[1, 3], [2, 1, 1]])
def test_ranks_compute_what_one_process_does(tmp_path, device, kernels, shares):
    """Packed micro-batches, samples of unequal lengths, unequal shares, several pieces an exchange."""
    data = write_data(tmp_path / "d.jsonl", samples=80, longest=30)
    keys = {"datasets": [{"path": str(data)}], "sample_packing": True, "adam_epsilon": 1e-3}
    keys["dataset_prepared_path"] = str(tmp_path / "cache")
    alone = mpi_rank.work(write_config(tmp_path / "one", gradient_accumulation_steps=4, **keys), device, None, kernels)
    ranks = ranks_of(write_config(tmp_path / "ranks", micro_batches_per_rank=shares, **keys), shares)
    for rank in ranks:
        rank.pop("device")
        assert rank.keys() == alone.keys()
        assert all(np.array_equal(rank[name], ranks[0][name]) for name in alone)
    tolerance = {"losses": 1e-6, "norms": 1e-6, "grads": 1e-6, "update": 1e-4}  # sums in another order
    for name, wanted in alone.items():
        if ".lora_A." in name and name.startswith("grads"):  # B is zero at first, so A has no gradient
            assert not np.any(wanted) and not np.any(ranks[0][name])
        else:
            assert np.any(wanted) and relative_error(ranks[0][name], wanted) < tolerance[name.split(".")[0]], name


SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")  # of Debian's chromium, which .ci/run installs
DRIVERS = [("LP_NATIVE_VECTOR_WIDTH", "128"), ("LP_NATIVE_VECTOR_WIDTH", "256"), ("VK_DRIVER_FILES", str(SWIFTSHADER))]


@pytest.mark.long
def test_ranks_on_different_drivers_hold_the_same_adapter(tmp_path):
    """Mesa with vectors of 4 and of 8 lanes, and SwiftShader, whose square roots and sums differ in the last bit."""
    drivers = DRIVERS if SWIFTSHADER.exists() else DRIVERS[:2]
    data = write_data(tmp_path / "d.jsonl", samples=40, longest=30)
    keys = {"datasets": [{"path": str(data)}], "dataset_prepared_path": str(tmp_path / "cache")}
    config = write_config(tmp_path / "run", gradient_accumulation_steps=2, **keys)
    program = [sys.executable, HERE / "mpi_rank.py", config, config.parent]
    jobs = [["-n", 1, "-env", name, value, *program] for name, value in drivers]
    done = mpiexec(*[word for job in jobs for word in (":", *job)][1:])
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [dict(np.load(config.parent / f"rank{rank}.npz")) for rank in range(len(drivers))]
    assert len({str(rank.pop("device")) for rank in ranks}) == len(drivers)
    for rank in ranks:
        assert all(np.array_equal(rank[name], ranks[0][name]) for name in ranks[0])
