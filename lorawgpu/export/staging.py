"""An export is complete or absent: written into a hidden folder, checked there, synced to disk, and renamed."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import marked, sweep_marked, sync_folder
from lorawgpu.files.lock import locked
from lorawgpu.files.paths import expand


@contextmanager
def staged(out: Path, main: str | None = None) -> Iterator[Path]:
    """Yields a new folder that becomes `out` if the block succeeds, and is removed otherwise.

    With `main`, the name of one of its files, `out` becomes that file and the others go next to it under its stem:
    X.gguf, X.chat_template.jinja. Raises UserError, before anything is written, if that would overwrite something.
    An OSError without a file name gets the name of `out`.
    """
    out = expand(out).absolute()
    if out.exists() and (main or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: already exists; remove it, or give --out another name")
    home = next(parent for parent in out.parents if parent.exists())  # a failure leaves no empty parents behind
    busy = f"{out}: another export is writing it; wait until it ends, or give --out another name"
    with _named(out), locked(home / f".{out.name}.lock", busy):
        sweep_marked(home, re.compile(re.escape(out.name)))  # left by an export that was killed
        partial = marked(home / out.name, "partial")
        partial.mkdir()
        try:
            yield partial
            _publish(partial, out, main)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _named(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        why = error.strerror or f"No space left on the disk? A write failed: {error}"  # numpy gives no reason
        raise OSError(error.errno or errno.EIO, why, str(out)) from None


def _publish(partial: Path, out: Path, main: str | None) -> None:
    for path in partial.rglob("*"):
        if path.is_file():
            _sync(path)
    sync_folder(partial)
    out.parent.mkdir(parents=True, exist_ok=True)
    if main:
        _publish_files(partial, out, main)
    else:
        if out.exists():
            out.rmdir()
        partial.rename(out)
    sync_folder(out.parent)


def file_names(out: Path, files: list[str], main: str) -> dict[str, Path]:
    """The path of each file if `out` is the file `main`."""
    return {name: out if name == main else out.with_name(f"{out.stem}.{name}") for name in files}


def _publish_files(partial: Path, out: Path, main: str) -> None:
    targets = file_names(out, sorted(path.name for path in partial.iterdir()), main)
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target}: already exists; remove it, or give --out another name")
    done = []
    try:
        for name, target in targets.items():
            os.rename(partial / name, target)
            done.append(target)
    except BaseException:
        for target in done:
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
