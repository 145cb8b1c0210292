"""`train --memory`: what is picked fits, keeps the tokens of a step, and stays with the run."""

import re

import pytest
import yaml
from tiny_run import adapter_bytes, write_config, write_data

from lorawgpu.config.load import load_config
from lorawgpu.errors import UserError
from lorawgpu.gpu import open_dry_device
from lorawgpu.train import __main__ as train
from lorawgpu.train import job
from lorawgpu.train.fit import PICKED, CardMemory

MIB = 2**20
KEYS = {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "sequence_len": 64}


@pytest.mark.parametrize(("text", "size"), [
    ("8GiB", 8 << 30), ("8 GB", 8 * 10**9), ("0.5gib", 1 << 29), ("300MiB", 300 * MIB), ("6.5 mb", 6_500_000),
])  # fmt: skip
def test_sizes(text, size):
    memory = CardMemory.read(text)
    assert memory.size == size and memory.usable + memory.reserved == size
    assert memory.reserved == int(min(0.7 * 2**30, size / 10))


@pytest.mark.parametrize("text", ["8", "", "GiB", "-1GiB", "0GiB", "8GiBs", "1e3MB", "8TB", "nan GiB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UserError, match="--memory .*wanted the GPU's memory in GiB, GB, MiB or MB"):
        CardMemory.read(text)


@pytest.mark.parametrize("nbytes", [1, 12345, MIB, 900 * MIB, 2**30, 7 * 2**30 + 5, 10**11])
def test_the_memory_that_holds_a_run(nbytes):
    wanted = CardMemory.holding(nbytes)
    assert CardMemory.read(wanted.text).usable >= nbytes
    assert wanted.usable < nbytes + (0.11 * 2**30 if nbytes > 2**30 else 0.11 * MIB)


@pytest.fixture
def plan(capsys):
    """A dry run: (GPU memory in bytes, the picked lines as a config), or (None, the message)."""

    def run(config, *argv):
        code = train.main([str(config), "--dry-run", *argv])
        said = capsys.readouterr()
        if code:
            assert code == 2
            return None, said.err
        counted = float(re.search(r"^memory +([\d,.]+) MiB", said.out, re.M)[1].replace(",", ""))
        lines = [line for line in said.out.splitlines() if line.startswith(("#", *(f"{key}:" for key in PICKED)))]
        return counted * MIB, yaml.safe_load("\n".join(lines))

    return run


def sets(**keys):
    return [arg for key, value in keys.items() for arg in ("--set", f"{key}={str(value).lower()}")]


@pytest.mark.parametrize("packing", [True, False])
def test_whatever_the_memory_the_run_fits_with_the_same_tokens_a_step(tmp_path, plan, packing):
    data = write_data(tmp_path / "long.jsonl", longest=60)
    config = write_config(tmp_path, **KEYS, sample_packing=packing, datasets=[{"path": str(data)}])
    seen = []
    for size in (0.8, 0.9, 1.2, 1.7, 2.8, 40):
        used, picked = plan(config, "--memory", f"{size}MiB")
        assert used <= CardMemory.read(f"{size}MiB").usable
        again, _ = plan(config, *sets(**picked))
        assert again == used
        count = picked["micro_batch_size"] * picked["gradient_accumulation_steps"]
        length = picked.get("sequence_len", 64)
        assert count * length == 8 * 64 if packing else count == 8
        assert length == 64 or (picked["micro_batch_size"], picked["gradient_checkpointing"]) == (1, True)
        seen.append(tuple(picked.values()))
    assert len(set(seen)) == 6 and seen[-1] == (8, 1, False)  # with plenty of memory, the fastest


def test_a_shorter_length_is_the_last_resort(tmp_path, plan, capsys):
    data = write_data(tmp_path / "long.jsonl", longest=60)
    config = write_config(tmp_path, **KEYS, sample_packing=True, datasets=[{"path": str(data)}])
    least, _ = plan(config, *sets(micro_batch_size=1, gradient_checkpointing=True))
    assert "sequence_len" not in plan(config, "--memory", CardMemory.holding(int(least)).text)[1]
    used, picked = plan(config, "--memory", f"{least / MIB:.2f}MiB")
    assert picked["sequence_len"] == 32 and used < 0.9 * least
    assert train.main([str(config), "--dry-run", "--memory", f"{least / MIB:.2f}MiB"]) == 0
    assert "sequence_len: 32 # was 64, with which nothing fits; longer samples are dropped" in capsys.readouterr().out


def test_nothing_fits(tmp_path, plan):
    config = write_config(tmp_path, **KEYS)
    _, message = plan(config, "--memory", "0.5MiB")
    assert "nothing fits" in message and "gradient_checkpointing true" in message and "micro_batch_size 1" in message
    wanted = re.search(r"wanted --memory ([\d.]+MiB) or more", message)[1]
    used, _ = plan(config, "--memory", wanted)
    assert used <= CardMemory.read(wanted).usable
    assert plan(config, "--memory", f"{float(wanted.removesuffix('MiB')) - 0.1:.1f}MiB")[0] is None


def test_what_was_picked_stays_with_the_run(tmp_path, capsys, train_main):
    """With and without --memory a resume goes on as an uninterrupted run."""
    keys = KEYS | {"gradient_accumulation_steps": 1, "save_steps": 2, "max_steps": 4, "lr_scheduler": "constant"}
    memory, found = ["--memory", "0.9MiB"], {}
    for name in ("whole", "with", "without"):
        config = write_config(tmp_path / name, **keys)
        first = [] if name == "whole" else ["--set", "max_steps=2"]
        assert train_main([str(config), *memory, *first]) == 0
        resolved = load_config(tmp_path / name / "out" / "config.yaml")
        assert resolved.gradient_checkpointing
        assert (resolved.micro_batch_size, resolved.gradient_accumulation_steps) == (1, 2)
        if name != "whole":
            capsys.readouterr()
            more = memory if name == "with" else []
            assert train_main([str(config), "--resume", *more]) == 0
            said = capsys.readouterr()
            assert "micro_batch_size: 1" in said.out
            assert ("as --memory picked" in said.out) == (name == "without")
        found[name] = adapter_bytes(tmp_path / name / "out")
    assert found["whole"] == found["with"] == found["without"]


def test_limits_that_nothing_fits(tmp_path, monkeypatch, capsys):
    """Not even 32 rows of queries, keys and values."""
    config = write_config(tmp_path, **KEYS)

    def small(choice, local_rank):
        device = open_dry_device(choice, local_rank=local_rank)
        device.limits = device.limits | {"max-storage-buffer-binding-size": 4096}
        return device

    monkeypatch.setattr(job, "open_dry_device", small)
    assert train.main([str(config), "--dry-run", "--memory", "8GiB"]) == 2
    assert "not even micro_batch_size 1, gradient_accumulation_steps 8" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_batches(tmp_path, capsys, train_main):
    config = write_config(tmp_path, **KEYS, save_steps=2, max_steps=2)
    assert train_main([str(config)]) == 0
    assert train_main([str(config), "--resume", "--memory", "0.5MiB", "--set", "max_steps=4"]) == 2
    message = capsys.readouterr().err
    assert "a resumed run keeps its batches" in message and "micro_batch_size 2" in message


def test_batches_given_by_process_are_not_picked(tmp_path, capsys):
    config = write_config(tmp_path, **KEYS, micro_batches_per_rank=[3])
    assert train.main([str(config), "--dry-run", "--memory", "8GiB"]) == 2
    assert "--memory picks batch sizes, and micro_batches_per_rank gives them" in capsys.readouterr().err
