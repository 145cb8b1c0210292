"""An export is whole or absent: written into a hidden folder, checked there, forced to disk, renamed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import sync_folder


@contextmanager
def staged(out: Path, main: str | None = None) -> Iterator[Path]:
    """A new folder that becomes `out` when the block ends without an error, and else leaves nothing.

    With `main`, the name of one of its files, `out` becomes that file and the others stand beside it under its stem:
    X.gguf, X.chat_template.jinja. UserError, before anything is written, when that would overwrite something.
    An OSError that names no file gets the name of `out`.
    """
    out = out.expanduser().absolute()
    if out.exists() and (main or not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already; remove it or give --out another name")
    home = next(parent for parent in out.parents if parent.exists())  # a failure leaves no empty parents behind
    beside = home / f".{out.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
    beside.mkdir()
    try:
        yield beside
        for path in beside.iterdir():
            _sync(path)
        sync_folder(beside)
        out.parent.mkdir(parents=True, exist_ok=True)
        if main:
            _publish_files(beside, out, main)
        else:
            if out.exists():
                out.rmdir()
            beside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        if error.filename is not None:
            raise
        why = error.strerror or f"No space left on the disk? A write failed: {error}"  # numpy names no reason
        raise OSError(error.errno or errno.EIO, why, str(out)) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def file_names(out: Path, files: list[str], main: str) -> dict[str, Path]:
    """Where each file goes when `out` is to be the file `main`."""
    return {name: out if name == main else out.with_name(f"{out.stem}.{name}") for name in files}


def _publish_files(beside: Path, out: Path, main: str) -> None:
    targets = file_names(out, sorted(path.name for path in beside.iterdir()), main)
    for target in targets.values():
        if target.exists():
            raise UserError(f"{target}: exists already; remove it or give --out another name")
    done = []
    try:
        for name, target in targets.items():
            os.rename(beside / name, target)
            done.append(target)
    except BaseException:
        for target in done:
            target.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
