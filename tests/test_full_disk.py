"""A disk that really fills up during a save: nothing is lost, and the run resumes once there is space.

The disk is a small tmpfs in its own mount namespace, so it disappears with its last process.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_resume import assert_same_run, everything
from tiny_run import adapter_bytes

from lorawgpu.train.checkpoint import load_checkpoint, newest_checkpoint

# Mounts the disk, leaves `free` bytes of it, trains and copies the result; makes space, resumes, and copies again.
SCENE = """
import json, os, shutil, subprocess, sys
from pathlib import Path
config, disk, away, size, free = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
(disk / "other").write_bytes(bytes(size - free))

def train():
    done = subprocess.run([sys.executable, "-m", "lorawgpu.train", config, "--resume"], capture_output=True, text=True)
    return {"code": done.returncode, "err": done.stderr, "left": os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize}

full = train()
if not (disk / "out").exists():
    sys.exit(full["err"])
shutil.copytree(disk / "out", away / "full")
(disk / "other").unlink()
resumed = train()
shutil.copytree(disk / "out", away / "resumed")
print(json.dumps([full, resumed]))
"""


@pytest.fixture(scope="module")
def namespace(tmp_path_factory) -> list[str]:
    """The prefix that runs a command in its own mount namespace; skips if mounting is not allowed."""
    folder, why = tmp_path_factory.mktemp("mount"), []
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        try:
            probe = [*command, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
            done = subprocess.run(probe, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no mount namespaces here: {error}")
        if done.returncode == 0:
            return command
        why.append(done.stderr.strip())
    pytest.skip(f"mounting is refused here: {'; '.join(why)}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run on a disk with space."""
    folder = tmp_path_factory.mktemp("whole")
    config = everything(folder, "whole", **KEYS)
    subprocess.run([sys.executable, "-m", "lorawgpu.train", str(config)], check=True, capture_output=True)
    return folder / "whole" / "out"


KEYS = {"lora_r": 32, "save_steps": 3, "save_total_limit": 9, "eval_steps": 100}


@pytest.mark.long
@pytest.mark.parametrize("part", [1.02, 1.4, 1.85])
def test_a_disk_that_fills_during_a_save_loses_nothing(tmp_path, namespace, whole, part):
    """Room for `part` checkpoints: the second save fails in its adapter or in its moments, early or late."""
    saved = whole / "checkpoint-3"
    one = sum(-(-file.stat().st_size // 4096) * 4096 for file in saved.iterdir())
    other_files = 64 << 10  # config, metrics, folders
    disk = tmp_path / "disk"
    disk.mkdir()
    config = everything(tmp_path, "cut", **KEYS, output_dir=str(disk / "out"))
    sizes = [str(-(-8 * one // 4096) * 4096), str(int(part * one) + other_files)]
    command = [*namespace, sys.executable, "-c", SCENE, str(config), str(disk), str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    full, resumed = json.loads(done.stdout)
    assert full["code"] == 2 and "Traceback" not in full["err"]
    assert "No space left on device; free space on its disk. The last good checkpoint is " in full["err"], full["err"]
    assert f"{disk / 'out' / 'checkpoint-3'}; --resume continues from it." in full["err"]
    assert full["left"] > (part - 1) * one  # the partial checkpoint was removed
    assert newest_checkpoint(tmp_path / "full").name == "checkpoint-3"
    assert same_files(tmp_path / "full" / "checkpoint-3", saved)
    assert not list((tmp_path / "full").glob(".*"))
    assert not (tmp_path / "full" / "adapter_model.safetensors").exists()
    assert resumed["code"] == 0, resumed["err"]
    assert_same_run(whole, tmp_path / "resumed")
    assert adapter_bytes(whole) == adapter_bytes(tmp_path / "resumed")


def same_files(a: Path, b: Path) -> bool:
    one, two = load_checkpoint(a), load_checkpoint(b)
    return all(
        getattr(one, part)[name].tobytes() == tensor.tobytes()
        for part in ("adapter", "m", "v")
        for name, tensor in getattr(two, part).items()
    )
