"""May a run use its output folder? It writes over no other run's files and over none of the user's.

In the order of a run:

claim                               one process at a time, and a checkpoint that was being replaced is put back
checkpoint_to_resume                where to continue from; UserError if the folder holds another run or user files
write_config, set_metrics_aside     what a run writes first
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.lock import only_run_in
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, METRICS_FILE, REPORT_FILE, RUN_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.train.checkpoint import list_checkpoints, newest_checkpoint, restore_replaced

MARK = "# The resolved config of this run, written by lorawgpu.\n"
# Written by a run, besides checkpoints.
WRITTEN = (WEIGHTS_FILE, ADAPTER_CONFIG_FILE, METRICS_FILE, RUN_CONFIG_FILE, REPORT_FILE)


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder, with every checkpoint in its place. UserError as `only_run_in`."""
    with only_run_in(folder):
        restore_replaced(folder)
        yield


def checkpoint_to_resume(run_folder: Path, choice: str | None, config_path: Path | None = None) -> Path | None:
    """The checkpoint that `--resume` means (None: not given; "auto": the newest whole one; a run folder: its newest),
    or None to start afresh. `config_path`: as `why_refused`.

    UserError when it does not exist, or when starting afresh, or from another place, would mix two runs in one folder
    or write over files of the user.
    """
    if reason := why_refused(run_folder, config_path, resuming=choice is not None):
        raise UserError(reason)
    if choice is None:
        return None
    path = Path(choice).expanduser().absolute()
    if choice == "auto" or path.resolve() == run_folder.resolve():
        return _newest(run_folder)
    if not path.exists():
        raise UserError(f"--resume {path}: no such folder; wanted a checkpoint-<step> folder, or auto for the newest")
    if list_checkpoints(path):
        path = _newest(path)
    found = list_checkpoints(run_folder)
    if found and found[-1].resolve() != path.resolve():
        raise UserError(
            f"--resume {choice}: {run_folder} holds {found[-1].name}, which another course of training would mix with; "
            "choose another output_dir, or move the later checkpoints away"
        )
    return path


def _newest(run_folder: Path) -> Path | None:
    newest, found = newest_checkpoint(run_folder), list_checkpoints(run_folder)
    if found and newest is None:
        raise UserError(f"{run_folder}: none of its {len(found)} checkpoints is whole; choose another output_dir")
    return newest


def why_refused(folder: Path, config_path: Path | None, resuming: bool) -> str | None:
    """Why no run may begin in `folder`, or None. `config_path`: the config that the run was started with; `resuming`:
    what is there may be continued, also if it was killed before its first checkpoint."""
    if checkpoints := list_checkpoints(folder):
        goes_on = f"{folder} already holds a run, up to {checkpoints[-1].name}: continue it with --resume, "
        return None if resuming else goes_on + "or choose another output_dir"
    ours = is_resolved(folder / RUN_CONFIG_FILE)
    if config_path and _same(config_path, folder / RUN_CONFIG_FILE) and not (resuming and ours):
        return (
            f"output_dir {folder} holds the config that was given, and the run would write its own {RUN_CONFIG_FILE} "
            "over it: choose another output_dir"
        )
    there = [name for name in WRITTEN if os.path.lexists(folder / name)]
    killed_early = there and not set(there) - {METRICS_FILE, *([RUN_CONFIG_FILE] if ours else [])}
    if not there or resuming and killed_early:
        return None
    text = f"{folder} already holds {', '.join(there)} of another run or of yours"
    if resuming:
        return f"{text}, and no checkpoint to resume from: choose another output_dir, or remove what is there"
    again = ", or start it again with --resume" if killed_early else ""
    return f"{text}: choose another output_dir, or remove what is there{again}"


def is_resolved(path: Path) -> bool:
    """Whether a run wrote this config file."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def write_config(folder: Path, text: str, config_path: Path | None) -> str | None:
    """The resolved config into the run folder. If the run was started with that very file, `config_path`, it stays,
    and the answer says so where the two differ."""
    path, text = folder / RUN_CONFIG_FILE, MARK + text
    if not (config_path and _same(config_path, path)):
        replace_file(path, text.encode())
    elif path.read_bytes() != text.encode():
        return f"{path} was given and stays as it is; this run differs from it by what --set says"
    return None


def set_metrics_aside(folder: Path) -> str | None:
    """Keep the metrics of a run that was killed before its first checkpoint; the answer says under which name."""
    path = folder / METRICS_FILE
    if not path.exists() or list_checkpoints(folder):
        return None
    number = 1
    while (kept := folder / f"metrics.{number}.jsonl").exists():
        number += 1
    path.rename(kept)
    return f"{path}: of a run that saved no checkpoint; kept as {kept.name}"


def _same(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False
