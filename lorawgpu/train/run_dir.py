"""What an output folder holds already: a run writes over no other run's files and over none of the user's."""

import os
from pathlib import Path

from lorawgpu.files.atomic import replace_file
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE, METRICS_FILE, REPORT_FILE, RUN_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.train.checkpoint import list_checkpoints

MARK = "# The resolved config of this run, written by lorawgpu.\n"
WRITTEN = (
    WEIGHTS_FILE,
    ADAPTER_CONFIG_FILE,
    METRICS_FILE,
    RUN_CONFIG_FILE,
    REPORT_FILE,
)  # by a run, besides checkpoints


def occupied(folder: Path, given: Path | None, resuming: bool) -> str | None:
    """Why no run may begin in `folder`, or None. `given`: the config file; `resuming`: what is there may be gone on
    from, also when it was killed before its first checkpoint."""
    if checkpoints := list_checkpoints(folder):
        goes_on = f"{folder} already holds a run, up to {checkpoints[-1].name}: continue it with --resume, "
        return None if resuming else goes_on + "or choose another output_dir"
    ours = is_resolved(folder / RUN_CONFIG_FILE)
    if given and _same(given, folder / RUN_CONFIG_FILE) and not (resuming and ours):
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


def write_config(folder: Path, text: str, given: Path | None) -> str | None:
    """The resolved config into the run folder. When that file is the one `given`, it stays, and the answer says so
    where the run goes by another."""
    path, text = folder / RUN_CONFIG_FILE, MARK + text
    if not (given and _same(given, path)):
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
