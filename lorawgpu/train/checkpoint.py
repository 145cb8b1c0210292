"""Checkpoints of a run: write `checkpoint-<step>/` atomically, and find the newest complete one.

A checkpoint is a PEFT adapter, `optimizer.safetensors` (AdamW's moments as "m.<adapter tensor>" and "v.<adapter
tensor>"), `trainer_state.json` (the trainer's state), and `SHA256SUMS` of these files, which `sha256sum -c` reads too.
It is written into a hidden folder, synced to disk and renamed, so a crash at any moment leaves the previous checkpoints
intact.
"""

import hashlib
import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.files.atomic import find_marked, marked, sweep_marked, sync_folder, write_synced
from lorawgpu.files.run_folder import (
    ADAPTER_CONFIG_FILE,
    CHECKPOINT_PATTERN,
    OPTIMIZER_FILE,
    STATE_FILE,
    SUMS_FILE,
    WEIGHTS_FILE,
    checkpoint_name,
)
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import read_bytes, read_json_object
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter

FORMAT = 3  # of `trainer_state.json`
_FILES = (WEIGHTS_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, STATE_FILE)
_NAME = re.compile(CHECKPOINT_PATTERN)
MAX_SUMS = 4096  # bytes of a `SHA256SUMS`
_log = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint. `adapter`, `m` and `v` have the same names and shapes, float32."""

    lora: LoraConfig
    adapter: Tensors
    m: Tensors
    v: Tensors
    state: dict[str, Any]  # JSON values, "step" among them


def save_checkpoint(run: Path, snapshot: Snapshot, base_model_name: str) -> Path:
    """Write `checkpoint-<step>` into a run folder, replacing a checkpoint of the same step; return its path.

    Raises CheckFailed if a value is not finite (nothing is written), and OSError if the disk fails (existing
    checkpoints stay).
    """
    for part, tensors in (("m", snapshot.m), ("v", snapshot.v)):
        for name, tensor in tensors.items():
            if not np.isfinite(tensor).all():
                raise CheckFailed(f"{run}: checkpoint not saved: {part} of {name} has a value that is not finite")
    run.mkdir(parents=True, exist_ok=True)
    _sweep(run)
    final = run / checkpoint_name(snapshot.state["step"])
    partial = marked(final, "partial")
    try:
        partial.mkdir()
        write_adapter(partial, snapshot.lora, snapshot.adapter, base_model_name)
        moments = {
            f"{part}.{name}": np.ascontiguousarray(tensor, np.float32)
            for part, tensors in (("m", snapshot.m), ("v", snapshot.v))
            for name, tensor in tensors.items()
        }
        write_synced(partial / OPTIMIZER_FILE, safetensors.numpy.save(moments))
        write_synced(partial / STATE_FILE, json.dumps(snapshot.state, indent=1, allow_nan=False).encode())
        write_synced(partial / SUMS_FILE, _sums(partial).encode())
        sync_folder(partial)
        if final.exists():
            final.rename(marked(final, "replaced"))
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # most likely the disk is full
        raise
    sync_folder(run)
    _sweep(run)
    return final


def restore_replaced(run: Path) -> None:
    """Put back a checkpoint whose replacement was interrupted between its two renames."""
    for name, path in find_marked(run, "replaced"):
        if _NAME.fullmatch(name) and not (run / name).exists():
            path.rename(run / name)


def _sweep(run: Path) -> None:
    """Remove what an interrupted save or removal left behind. What cannot be removed is only in the way."""
    restore_replaced(run)
    try:
        sweep_marked(run, _NAME, ("partial", "replaced", "removed"))
    except OSError as error:
        _log.warning("%s cannot be removed: %s; remove it by hand", error.filename or run, error.strerror)


def _sums(folder: Path) -> str:
    """The SHA-256 of each file of a checkpoint, as `sha256sum` prints it."""
    lines = []
    for name in _FILES:
        with open(folder / name, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def list_checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run by step, oldest first, damaged ones included; nothing on disk is changed.

    A checkpoint that `restore_replaced` has not put back yet is listed under its hidden name.
    """
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    for name, path in find_marked(run, "replaced"):
        if (match := _NAME.fullmatch(name)) and not (run / name).exists():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def newest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Damaged ones are skipped with a warning that says why."""
    for path in reversed(list_checkpoints(run)):
        try:
            _read_state(path)
        except UserError as error:
            _log.warning("skipped %s", error)
        else:
            return path
    return None


def _read_state(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint and read its state. UserError, naming the file that is missing or damaged."""
    if not (path / SUMS_FILE).exists() and (path / STATE_FILE).exists():
        _refuse_other_format(path, read_json_object(path / STATE_FILE))
    for name in (*_FILES, SUMS_FILE):
        if not (path / name).is_file():
            raise UserError(f"{path}: {name} is missing")
    found, saved = _sums(path), read_bytes(path / SUMS_FILE, MAX_SUMS)
    if found.encode() != saved:
        intact = saved.decode("ascii", "replace").splitlines()
        changed = [line.split()[1] for line in found.splitlines() if line not in intact] or [SUMS_FILE]
        raise UserError(f"{path}: {changed[0]} is not the file that was saved (truncated or changed)")
    state = read_json_object(path / STATE_FILE)
    _refuse_other_format(path, state)
    return state


def _refuse_other_format(path: Path, state: dict) -> None:
    if state.get("format") != FORMAT:
        raise UserError(
            f"{path}: another version of lorawgpu wrote this checkpoint, so it cannot be resumed; to train its adapter "
            f"further, start a run in another output_dir with `adapter: {path}`"
        )


def load_checkpoint(path: Path) -> Snapshot:
    """Read a checkpoint folder. Raises UserError if it is not complete."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; wanted a checkpoint-<step> folder to resume from")
    state = _read_state(path)
    lora, adapter = read_adapter(path)
    file = SafetensorsFile(path / OPTIMIZER_FILE)
    moments = {part: {name: file.entries.get(f"{part}.{name}") for name in adapter} for part in "mv"}
    for part, entries in moments.items():
        for name, entry in entries.items():
            if entry is None or entry.dtype != "F32" or entry.shape != adapter[name].shape:
                raise UserError(f"{path / OPTIMIZER_FILE}: {part}.{name} is missing or does not fit the adapter")
    m, v = ({name: file.read(f"{part}.{name}").copy() for name in adapter} for part in "mv")
    return Snapshot(lora, adapter, m, v, state)


def prune_checkpoints(run: Path, limit: int, best: Path | None = None) -> None:
    """Keep the newest `limit` checkpoints, and `best` at any age. An interrupted removal leaves no partial one."""
    restore_replaced(run)
    for path in list_checkpoints(run)[:-limit]:
        if best is None or path.name != best.name:
            try:
                path.rename(marked(path, "removed"))
            except OSError as error:  # the newer one is saved: no reason to end the run
                _log.warning("%s cannot be removed: %s; remove it by hand", path, error.strerror)
    _sweep(run)


def differences(saved: dict[str, Any], current: dict[str, Any], reasons: dict[str, str] | None = None) -> list[str]:
    """The differences between two identities (settings and digests by name), one entry per name.

    `reasons`: by name, an explanation that replaces the two values.
    """
    names = [name for name in sorted(saved.keys() | current.keys()) if saved.get(name) != current.get(name)]
    values = {n: f"the checkpoint has {_shown(saved.get(n))}, this run {_shown(current.get(n))}" for n in names}
    return [f"{name}: {text}" for name, text in (values | (reasons or {})).items() if name in values]


def _shown(value: Any) -> str:
    """As the config file spells it."""
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def require_same(
    saved: dict[str, Any], current: dict[str, Any], path: Path, reasons: dict[str, str] | None = None
) -> None:
    """Raises UserError with every difference between a checkpoint's identity and this run's, which would make the
    resumed run inexact. `reasons`: as for `differences`."""
    if different := differences(saved, current, reasons):
        raise UserError(
            f"{path}: made by another run, so it cannot be resumed here\n  "
            + "\n  ".join(different)
            + "\nRestore these, or choose another output_dir to start a new run."
        )
