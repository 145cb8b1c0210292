"""Matrix cores: whether the runtime grants them, and a trial of what they compute, in a process of its own.

A driver may abort on kernels with matrix cores, which no `except` survives. So each driver and runtime is tried once in
a child, and the answer is kept in `matrix_cores.json` in the cache folder. Whatever goes wrong, the kernels without
matrix cores do the work. docs/matrix-cores.md tells users.
"""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import lib_path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.paths import default_cache_dir
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.gpu.capabilities import MatrixCores
from lorawgpu.gpu.plan import Plan

FEATURES = ("cooperative-matrix", "shader-f16", "subgroup")  # asked for together, or not at all
MODES = ("auto", "off", "fast")
CHOICE = "LORAWGPU_MATRIX_CORES"  # a mode
TILES = (16, 8)  # the larger first
LANES = (8, 16, 32, 64)  # of a subgroup, for which kernels exist
TRIAL = ("-m", "lorawgpu.gpu.matrix_trial")
TRIAL_SECONDS = 60
MEMORY_FILE = "matrix_cores.json"
MAX_REMEMBERED = 50


def mode_of(choice: str | None = None) -> str:
    """`choice`, else LORAWGPU_MATRIX_CORES, else auto. UserError if it is no mode."""
    mode = choice or os.environ.get(CHOICE) or "auto"
    if mode not in MODES:
        raise UserError(f"{CHOICE}={mode!r}: want {', '.join(MODES[:-1])} or {MODES[-1]}")
    return mode


def offered(adapter) -> bool:
    """Whether the adapter lists what the kernels need. The runtime may still refuse it."""
    return all(feature in adapter.features for feature in FEATURES)


def found_cores(device, index: int) -> tuple[MatrixCores | None, str]:
    """The matrix cores of a device that was granted FEATURES, or None, and a line that says why.

    index: the adapter's place in `list_adapters`.
    """
    key = _key(device.adapter.info)
    remembered = _remembered().get(key)
    answer = remembered if _is_answer(remembered) else _tried_in_a_child(index)
    if answer is not remembered:
        _remember(key, answer)
    if "tile" not in answer:
        return None, answer["reason"]
    cores = MatrixCores(answer["tile"], answer["lanes"])
    # The file may be another machine's, or the driver may have been replaced under the same name.
    if trial(device, cores.tile) != cores.lanes:
        return None, "they gave wrong results in this process, other than in an earlier trial"
    return cores, f"tiles of {cores.tile}, subgroups of {cores.lanes}"


def trial(device, tile: int) -> int | None:
    """The lanes of a subgroup if a product of tiles is exact and lanes form subgroups in order, else None."""
    plan = Plan(device)
    try:
        out, members = device.tensor((tile, tile), label="trial"), device.tensor((128, 2), "u32", "trial")
        with plan.section("trial"):
            template = {"engine": "cooperative", "T": tile, "lanes": 32}
            plan.record("matrix_probe", "main", (1,), template=template, out=out, members=members)
        plan.run("trial")
        subgroups, sizes = device.read(members).T
        got = device.read(out)
    except Exception:  # whatever the driver says, it is a no
        return None
    i, j = np.indices((tile, tile))
    want = ((5 * i + 3 * j) % 17 - 8) @ ((7 * i + j) % 3 - 1)
    lanes = int(sizes[0])
    orderly = lanes in LANES and (sizes == lanes).all() and (subgroups == np.arange(128) // lanes).all()
    return lanes if orderly and np.array_equal(got, want) else None


def _tried_in_a_child(index: int) -> dict:
    """What a child process found: {"tile", "lanes"} or {"reason"}."""
    command = [sys.executable, *TRIAL, str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"reason": f"the trial did not end: {type(error).__name__}"}
    lines = done.stdout.splitlines()
    if done.returncode:
        return {"reason": f"the trial ended with code {done.returncode}: the driver does not get along with them"}
    with suppress(ValueError):
        answer = json.loads(lines[-1] if lines else "")
        if _is_answer(answer):
            return answer
    return {"reason": "the trial gave no answer"}


def _is_answer(answer) -> bool:
    if not isinstance(answer, dict):
        return False
    cores = answer.get("tile") in TILES and answer.get("lanes") in LANES
    return cores or (isinstance(answer.get("reason"), str) and len(answer["reason"]) < 500)


def _key(info: dict) -> str:
    """Changes with the device, its driver and the runtime."""
    library = os.stat(lib_path)
    facts = [info[name] for name in ("vendor_id", "device_id", "device", "description", "backend_type")]
    text = json.dumps([*facts, wgpu.__version__, str(lib_path), library.st_size, library.st_mtime_ns])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _file() -> Path | None:
    return (folder := default_cache_dir()) and folder / MEMORY_FILE


def _remembered() -> dict:
    with suppress(UserError, OSError):
        if (path := _file()) and path.is_file():
            return read_json_object(path)
    return {}


def _remember(key: str, answer: dict) -> None:
    recent = dict([*_remembered().items()][1 - MAX_REMEMBERED :]) | {key: answer}
    with suppress(OSError):
        if path := _file():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps(recent, indent=0).encode())
