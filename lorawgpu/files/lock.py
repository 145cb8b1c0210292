"""One training run at a time in a folder: two would sweep away and overwrite each other's checkpoints.

The lock is the operating system's, on an open file: it ends with its process, however that dies, so that a file left
behind by a killed run blocks nobody.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import LOCK_FILE

_log = logging.getLogger(__name__)


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder, which is made for it, and removed again when nothing was put in.

    UserError when another process holds it, or when the folder cannot be made or written to.
    """
    handle = None
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        while handle is None:
            handle = _open_locked(folder)
    except OSError as error:
        what = "it is a link to nowhere" if os.path.islink(folder) else error.strerror
        raise UserError(
            f"output_dir {folder}: cannot be made or written to: {what}; choose another output_dir, or see to its "
            "permissions"
        ) from None
    try:
        yield
    finally:
        if os.name == "nt":  # which removes no open file; one that the next run has opened stays
            os.close(handle)
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        if os.name != "nt":  # after the name is gone, or another run could lock a file that is about to go
            os.close(handle)
        with suppress(OSError):  # up to the first that is not empty
            for path in missing:
                path.rmdir()


def _open_locked(folder: Path) -> int | None:
    """The locked file's handle; None when the run before removed it, or the folder, at this very moment."""
    path = folder / LOCK_FILE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    try:
        _lock(handle)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except FileNotFoundError:
        pass
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise UserError(
            f"{folder}: another run is training in this folder; wait until it ends, or choose another output_dir"
        ) from None
    except OSError as error:
        _log.warning("%s: this file system has no locks (%s): start no second run in it", folder, error.strerror)
        return handle
    os.close(handle)
    return None


if os.name == "nt":
    import msvcrt

    def _lock(handle: int) -> None:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
