"""Locking a run folder: two runs in one folder would delete and overwrite each other's checkpoints.

It is the operating system's lock on an open file. It ends with the process, however that dies, so a lock file left by
a killed run blocks nobody.
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
    """Hold the lock of a run folder. The folder is created if necessary, and removed again if it stays empty.

    UserError if another process holds the lock, or the folder cannot be created or written to.
    """
    handle = None
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        while handle is None:
            handle = _open_locked(folder)
    except OSError as error:
        why = "it is a broken link" if os.path.islink(folder) else error.strerror
        raise UserError(
            f"output_dir {folder}: cannot be created or written to: {why}; choose another output_dir, or fix its "
            "permissions"
        ) from None
    try:
        yield
    finally:
        if os.name == "nt":  # Windows cannot remove an open file; one that the next run has opened stays
            os.close(handle)
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        if os.name != "nt":  # unlink first, or another run could lock a file that is about to go
            os.close(handle)
        with suppress(OSError):  # stops at the first folder that is not empty
            for path in missing:
                path.rmdir()


def _open_locked(folder: Path) -> int | None:
    """The handle of the locked file; None if an ending run removed it or the folder at the same moment."""
    path = folder / LOCK_FILE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except FileNotFoundError:
        return None
    except OSError:
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link, which a lock file never is; remove it, or choose another folder"
            ) from None
        raise
    try:
        _lock(handle)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except FileNotFoundError:
        pass
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise UserError(
            f"{folder}: another run is using this folder; wait until it ends, or choose another output_dir"
        ) from None
    except OSError as error:
        _log.warning("%s: no file locks here (%s); do not start a second run in it", folder, error.strerror)
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
