"""The output folder of a run. A run never overwrites files of another run or of the user.

In the order in which a run calls them:

claim                               lock the folder, and put back a checkpoint that was being replaced
checkpoint_to_resume                where to continue from; UserError if the folder holds another run or user files
write_config, set_metrics_aside     the first files that a run writes
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file, sweep_marked
from lorawgpu.files.lock import only_run_in
from lorawgpu.files.paths import expand
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, METRICS_FILE, REPORT_FILE, RUN_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.train.checkpoint import list_checkpoints, newest_checkpoint, restore_replaced

MARK = "# The resolved config of this run, written by lorawgpu.\n"
# What a run writes in addition to checkpoints.
WRITTEN = (WEIGHTS_FILE, ADAPTER_CONFIG_FILE, METRICS_FILE, RUN_CONFIG_FILE, REPORT_FILE)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes, put back its checkpoints and remove half-written files of a run that
    was killed. Raises UserError as `only_run_in`."""
    with only_run_in(folder):
        restore_replaced(folder)
        sweep_marked(folder, re.compile("|".join(map(re.escape, WRITTEN))))
        yield


def checkpoint_to_resume(run_folder: Path, choice: str | None, config_path: Path | None = None) -> Path | None:
    """The checkpoint that `--resume` selects, or None to start a new run.

    `choice`: None if `--resume` was not given, "auto" for the newest complete checkpoint, a checkpoint folder, or a run
    folder for its newest checkpoint; `config_path`: as for `why_refused`. Raises UserError if the checkpoint does not
    exist, or if the run would mix with another run in `run_folder` or overwrite files of the user.
    """
    if reason := why_refused(run_folder, config_path, resuming=choice is not None):
        raise UserError(reason)
    if choice is None:
        return None
    path = expand(choice).absolute()
    if choice == "auto" or path.resolve() == run_folder.resolve():
        return _newest(run_folder)
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder; wanted a checkpoint-<step> folder, or auto for the newest")
    if list_checkpoints(path):
        path = _newest(path)
    found = list_checkpoints(run_folder)
    if found and found[-1].resolve() != path.resolve():
        raise UserError(
            f"--resume {choice}: {run_folder} already holds {found[-1].name}, and two runs must not mix; "
            "choose another output_dir, or move the later checkpoints away"
        )
    return path


def _newest(run_folder: Path) -> Path | None:
    newest, found = newest_checkpoint(run_folder), list_checkpoints(run_folder)
    if found and newest is None:
        raise UserError(f"{run_folder}: none of its {len(found)} checkpoints can be resumed; choose another output_dir")
    return newest


def why_refused(folder: Path, config_path: Path | None, resuming: bool) -> str | None:
    """Why a run may not start in `folder`, or None if it may.

    `config_path`: the config file that the run was started with; `resuming`: whether the run in the folder may be
    continued, even if it was killed before its first checkpoint.
    """
    if no_place := _no_place(folder):
        return no_place
    if checkpoints := list_checkpoints(folder):
        reason = f"{folder} already holds a run, up to {checkpoints[-1].name}: continue it with --resume, "
        return None if resuming else reason + "or choose another output_dir"
    ours = is_resolved(folder / RUN_CONFIG_FILE)
    if config_path and _same(config_path, folder / RUN_CONFIG_FILE) and not (resuming and ours):
        return (
            f"output_dir {folder} holds the config file of this run, which would be overwritten by the resolved "
            f"{RUN_CONFIG_FILE}: choose another output_dir"
        )
    existing = [name for name in WRITTEN if os.path.lexists(folder / name)]
    killed_early = existing and not set(existing) - {METRICS_FILE, *([RUN_CONFIG_FILE] if ours else [])}
    if not existing or resuming and killed_early:
        return None
    text = f"{folder} already holds {', '.join(existing)} of another run or of your own"
    if resuming:
        return f"{text}, and no checkpoint to resume from: choose another output_dir, or remove these files"
    restart = ", or restart that run with --resume" if killed_early else ""
    return f"{text}: choose another output_dir, or remove these files{restart}"


def _no_place(folder: Path) -> str | None:
    """Why `folder` cannot be made or written to, as far as can be seen without trying."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        what = "a broken link" if there.is_symlink() and not there.exists() else "a file"
        return f"output_dir {folder}: {there} is {what}, not a folder: choose another output_dir"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"output_dir {folder}: {there} may not be written to: choose another output_dir, or fix its permissions"
    return None


def is_resolved(path: Path) -> bool:
    """Whether a run wrote this config file."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def write_config(folder: Path, text: str, config_path: Path | None) -> str | None:
    """Write the resolved config into the run folder.

    If the run was started with that same file, `config_path`, it is kept; returns a note if the two differ.
    """
    path, text = folder / RUN_CONFIG_FILE, MARK + text
    if not (config_path and _same(config_path, path)):
        replace_file(path, text.encode())
    elif path.read_bytes() != text.encode():
        return f"{path} is the config of this run and was not overwritten; the --set options are not in it"
    return None


def set_metrics_aside(folder: Path) -> str | None:
    """Rename the metrics of a run that was killed before its first checkpoint; returns a note with the new name."""
    path = folder / METRICS_FILE
    if not path.exists() or list_checkpoints(folder):
        return None
    number = 1
    while (kept := folder / f"metrics.{number}.jsonl").exists():
        number += 1
    path.rename(kept)
    return f"{path} is from a run that saved no checkpoint; renamed to {kept.name}"


def _same(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False
