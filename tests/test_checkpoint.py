"""Checkpoints: exact, complete or absent whatever happens during a save, and the right one is found again."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.files import atomic
from lorawgpu.files.atomic import marked, replace_file
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, STATE_FILE, SUMS_FILE, WEIGHTS_FILE
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, tensor_names
from lorawgpu.train.checkpoint import (
    FORMAT,
    Snapshot,
    differences,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    require_same,
    save_checkpoint,
)

LORA = LoraConfig(2, 4, ("q_proj",), use_rslora=True, dropout=0.25)


def snapshot(step: int, size: int = 3) -> Snapshot:
    """Different numbers for every step, awkward ones among them."""
    rng = np.random.default_rng(step)
    a, b = tensor_names("model.layers.0.self_attn.q_proj")

    def tensors():
        both = {a: rng.standard_normal((2, size)), b: rng.standard_normal((size, 2))}
        both = {name: tensor.astype(np.float32) for name, tensor in both.items()}
        both[a][0, :2] = [1e-45, -0.0]
        return both

    state = {
        "format": FORMAT,
        "step": step,
        "epoch": 0.1 + step / 3,
        "loss": 1e-300,
        "identity": {"seed": 1},
        "order": [2, 0, 1],
    }
    return Snapshot(LORA, tensors(), tensors(), tensors(), state)


def same(one: Snapshot, other: Snapshot) -> bool:
    def same_tensors(x, y):
        return x.keys() == y.keys() and all(x[name].tobytes() == y[name].tobytes() for name in x)

    parts = ((one.adapter, other.adapter), (one.m, other.m), (one.v, other.v))
    return one.lora == other.lora and one.state == other.state and all(same_tensors(*pair) for pair in parts)


def test_round_trip_is_exact(tmp_path):
    saved = save_checkpoint(tmp_path / "run", snapshot(12), "owner/base")
    assert saved == tmp_path / "run" / "checkpoint-12" == newest_checkpoint(tmp_path / "run")
    assert {p.name for p in saved.iterdir()} == {
        WEIGHTS_FILE,
        ADAPTER_CONFIG_FILE,
        OPTIMIZER_FILE,
        STATE_FILE,
        SUMS_FILE,
    }
    assert same(load_checkpoint(saved), snapshot(12))
    assert read_adapter(saved)[0] == LORA  # PEFT can load a checkpoint as an adapter
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["checkpoint-12"]


def test_the_same_snapshot_gives_the_same_bytes(tmp_path):
    one, two = (save_checkpoint(tmp_path / name, snapshot(3), "base") for name in "ab")
    assert all((two / file.name).read_bytes() == file.read_bytes() for file in one.iterdir())


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, snapshot(5), "base")
    newer = replace(snapshot(6), state=snapshot(5).state)
    save_checkpoint(tmp_path, newer, "base")
    assert same(load_checkpoint(tmp_path / "checkpoint-5"), newer)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-5"]


@pytest.mark.parametrize("part", ["adapter", "m", "v"])
def test_nothing_that_is_not_finite_is_saved(tmp_path, part):
    bad = snapshot(8)
    name = next(iter(bad.adapter))
    getattr(bad, part)[name][1, 1] = np.nan
    save_checkpoint(tmp_path, snapshot(7), "base")
    with pytest.raises(CheckFailed, match=f"not saved: .*{name} .*finite"):
        save_checkpoint(tmp_path, bad, "base")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-7"]


def test_newest_is_by_number_and_skips_damaged_ones(tmp_path, caplog):
    assert newest_checkpoint(tmp_path) is None and newest_checkpoint(tmp_path / "gone") is None
    for step in (9, 10, 100):
        save_checkpoint(tmp_path, snapshot(step), "base")
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-200").mkdir()
    marked(tmp_path / "checkpoint-300", "partial").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"checkpoint-{n}" for n in (9, 10, 100, 200)]
    assert newest_checkpoint(tmp_path).name == "checkpoint-100"
    assert f"checkpoint-200: {WEIGHTS_FILE} is missing" in caplog.text


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        (OPTIMIZER_FILE, lambda b: b[:-1], f"{OPTIMIZER_FILE} is not the file that was saved"),
        (OPTIMIZER_FILE, lambda b: b[:-1] + bytes([b[-1] ^ 1]), f"{OPTIMIZER_FILE} is not the file that was saved"),
        (OPTIMIZER_FILE, lambda b: None, f"{OPTIMIZER_FILE} is missing"),
        (WEIGHTS_FILE, lambda b: b + b"0", f"{WEIGHTS_FILE} is not the file that was saved"),
        (ADAPTER_CONFIG_FILE, lambda b: b"", f"{ADAPTER_CONFIG_FILE} is not the file that was saved"),
        (STATE_FILE, lambda b: b[: len(b) // 2], f"{STATE_FILE} is not the file that was saved"),
        (STATE_FILE, lambda b: b.replace(b'"seed": 1', b'"seed": 2'), f"{STATE_FILE} is not the file that was saved"),
        (STATE_FILE, lambda b: None, f"{STATE_FILE} is missing"),
        (SUMS_FILE, lambda b: b.upper(), "is not the file that was saved"),
        (SUMS_FILE, lambda b: b + b"\n", f"{SUMS_FILE} is not the file that was saved"),
        (SUMS_FILE, lambda b: None, f"{SUMS_FILE} is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_skipped(tmp_path, caplog, file, damage, words):
    save_checkpoint(tmp_path, snapshot(1), "base")
    path = save_checkpoint(tmp_path, snapshot(2), "base") / file
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(UserError) as error:
        load_checkpoint(tmp_path / "checkpoint-2")
    assert words in str(error.value) and "checkpoint-2" in str(error.value)
    assert newest_checkpoint(tmp_path).name == "checkpoint-1" and words in caplog.text


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    """A bit of every byte, each time another one."""
    path = save_checkpoint(tmp_path, snapshot(1), "base")
    flips = 0
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for place in range(len(data)):
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(UserError, match="is not the file that was saved"):
                load_checkpoint(path)
            flips += 1
        file.write_bytes(data)
    assert same(load_checkpoint(path), snapshot(1)) and flips > 1500, flips


def test_the_sums_are_those_of_sha256sum(tmp_path):
    path = save_checkpoint(tmp_path, snapshot(1), "base")
    wanted = [f"{hashlib.sha256((path / n).read_bytes()).hexdigest()}  {n}" for n in
              (WEIGHTS_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, STATE_FILE)]  # fmt: skip
    assert (path / SUMS_FILE).read_text().splitlines() == wanted


def test_only_what_carries_our_mark_is_swept(tmp_path):
    """Folders and links of the user, whatever they are called, and what a link leads to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in (".checkpoint-3.mine", ".checkpoint-3.partial", ".checkpoint-2.removed", ".checkpoint-1.replaced"):
        (run / name).mkdir()
    (run / f".checkpoint-1.{'0' * 16}.partial").symlink_to(outside)
    (run / f".checkpoint-1.{'1' * 16}.replaced").symlink_to(outside)
    ours = marked(run / "checkpoint-7", "partial")
    ours.mkdir()
    before = set(run.iterdir()) - {ours}
    for step in (1, 2, 3):
        save_checkpoint(run, snapshot(step), "base")
        prune_checkpoints(run, 1)
    assert set(run.iterdir()) == before | {run / "checkpoint-3"}
    assert (outside / "file").read_text() == "mine"


def test_an_old_checkpoint_that_cannot_be_removed_is_a_note(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save_checkpoint(tmp_path, snapshot(step), "base")

    def refuse(self, target):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    prune_checkpoints(tmp_path, 1)
    assert "checkpoint-1 cannot be removed: Permission denied" in caplog.text
    assert newest_checkpoint(tmp_path).name == "checkpoint-2"


def test_a_missing_folder(tmp_path):
    with pytest.raises(UserError, match="checkpoint-3: no such folder"):
        load_checkpoint(tmp_path / "checkpoint-3")


def test_moments_that_do_not_fit_the_adapter(tmp_path):
    small, large = snapshot(1, size=3), snapshot(1, size=4)
    path = save_checkpoint(tmp_path, replace(small, m=large.m), "base")
    with pytest.raises(UserError, match="m.base_model.*lora_A.weight is missing or does not fit the adapter"):
        load_checkpoint(path)


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 3, 10, 20):
        save_checkpoint(tmp_path, snapshot(step), "base")
    prune_checkpoints(tmp_path, 2, best=tmp_path / "checkpoint-2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2", "checkpoint-20"]
    prune_checkpoints(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-20"]
    prune_checkpoints(tmp_path, 5)
    assert newest_checkpoint(tmp_path).name == "checkpoint-20"


def test_identities():
    saved = {"lora_r": 8, "data": "ab", "seed": 1}
    assert differences(saved, dict(saved)) == []
    require_same(saved, dict(saved), Path("checkpoint-1"))
    with pytest.raises(UserError) as error:
        require_same(saved, {"lora_r": 16, "data": "ab", "model": "x"}, Path("out/checkpoint-1"))
    message = str(error.value)
    assert "out/checkpoint-1: made by another run" in message and "data" not in message.replace("data:", "")
    for words in (
        "lora_r: the checkpoint has 8, this run 16",
        "seed: the checkpoint has 1, this run nothing",
        "model: ",
    ):
        assert words in message


CRASHES = """
import os, sys
from pathlib import Path
from lorawgpu.files import atomic
from lorawgpu.train import checkpoint
from tests.test_checkpoint import same, snapshot

def crash_at(k, run):
    '''In a child: save step 2 over an old step 2, and die at the k-th call that changes the disk.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    calls = 0
    def dying(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == k:
                os._exit(9)
            return real(*args, **kwargs)
        return call
    for owner, name in ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir")):
        setattr(owner, name, dying(getattr(os, name)))
    checkpoint.save_checkpoint(run, snapshot(2), "base")
    checkpoint.prune_checkpoints(run, 1)
    os._exit(0)

old = snapshot(2)
old.m["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][:] = 7
k = 0
while True:
    k += 1
    run = Path(sys.argv[1]) / str(k)
    checkpoint.save_checkpoint(run, snapshot(1), "base")
    checkpoint.save_checkpoint(run, old, "base")
    status = crash_at(k, run)
    checkpoint.restore_replaced(run)
    newest = checkpoint.newest_checkpoint(run)
    held = checkpoint.load_checkpoint(newest)
    assert newest.name == "checkpoint-2" and (same(held, old) or same(held, snapshot(2))), (k, newest)
    checkpoint.save_checkpoint(run, snapshot(3), "base")  # the run goes on, whatever the crash left behind
    assert same(checkpoint.load_checkpoint(run / "checkpoint-3"), snapshot(3))
    assert not list(run.glob(".*")), k
    if status == 0:
        break
print("crashes", k - 1)
"""


def python(code: str, *args: str, **kwargs):
    root = Path(__file__).parent.parent
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=env, cwd=root, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="dies in a forked child")
def test_a_crash_between_any_two_disk_operations_loses_nothing(tmp_path):
    process = python(CRASHES, str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert int(out.split()[1]) >= 15  # 4 files written, synced, renamed; folders; the swap; the sweep


SAVES = """
import sys
from pathlib import Path
from lorawgpu.train import checkpoint
from tests.test_checkpoint import snapshot
run, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    checkpoint.save_checkpoint(run, snapshot(step, size=200_000), "base")
    checkpoint.prune_checkpoints(run, 2)
    print(step, flush=True)
"""


def test_kills_at_random_moments_lose_nothing(tmp_path):
    moments = random.Random(0)
    done = 0
    for _ in range(6):
        process = python(SAVES, str(tmp_path), str(done))
        first = process.stdout.readline()
        assert first, process.stderr.read()
        time.sleep(moments.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        steps = [int(line) for line in [first, *process.communicate()[0].splitlines(keepends=True)] if "\n" in line]
        newest = newest_checkpoint(tmp_path)
        held = load_checkpoint(newest)
        assert held.state["step"] in (steps[-1], steps[-1] + 1)  # the last one reported, or the one being written
        assert same(held, snapshot(held.state["step"], size=200_000))
        done = held.state["step"]


@pytest.mark.parametrize("call", ["fsync", "replace", "rename", "mkdir"])
def test_a_failing_disk_is_an_error_and_loses_nothing(tmp_path, monkeypatch, call):
    """Each call in turn fails as on a full disk."""
    real, failed = getattr(os, call), 0
    for k in range(1, 20):
        run = tmp_path / str(k)
        save_checkpoint(run, snapshot(1), "base")
        calls = 0

        def full(*args, k=k, **kwargs):
            nonlocal calls
            calls += 1
            if calls == k:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            try:
                save_checkpoint(run, snapshot(2), "base")
            except OSError as error:
                failed += 1
                assert error.errno == 28
        newest = newest_checkpoint(run)
        assert same(load_checkpoint(newest), snapshot(newest.stat() and int(newest.name.split("-")[1])))
        assert not list(run.glob(".checkpoint-*")), "a full disk must get its space back"
    assert failed > 0


def test_a_link_in_place_of_a_temporary_file_is_never_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / ".f.partial").symlink_to(victim)
    monkeypatch.setattr(atomic.secrets, "token_hex", lambda n: "0" * 2 * n)
    (tmp_path / f".g.{'0' * 16}.partial").symlink_to(victim)
    replace_file(tmp_path / "f", b"new")
    with pytest.raises(FileExistsError):  # even if the mark is guessed
        replace_file(tmp_path / "g", b"new")
    assert victim.read_text() == "mine" and (tmp_path / "f").read_bytes() == b"new"


def test_replace_file_shows_the_old_bytes_or_the_new(tmp_path, monkeypatch):
    path = tmp_path / "f"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_state_is_plain_json(tmp_path):
    path = save_checkpoint(tmp_path, snapshot(1), "base")
    state = json.loads((path / STATE_FILE).read_text())
    assert state == snapshot(1).state
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(
            tmp_path, replace(snapshot(2), state={"format": FORMAT, "step": 2, "best": float("inf")}), "base"
        )
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
