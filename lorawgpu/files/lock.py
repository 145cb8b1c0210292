"""Locks: two runs in one folder, or two exports to one name, would delete and overwrite each other's files.

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
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    busy = f"{folder}: another run is using this folder; wait until it ends, or choose another output_dir"
    try:
        handle = _acquire(folder / LOCK_FILE, busy)
    except OSError as error:
        why = "it is a broken link" if os.path.islink(folder) else error.strerror
        raise UserError(
            f"output_dir {folder}: cannot be created or written to: {why}; choose another output_dir, or fix its "
            "permissions"
        ) from None
    try:
        yield
    finally:
        _release(folder / LOCK_FILE, handle)
        with suppress(OSError):  # stops at the first folder that is not empty
            for path in missing:
                path.rmdir()


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file `path`. UserError(`busy`) if another process holds it, OSError if it cannot be created."""
    handle = _acquire(path, busy)
    try:
        yield
    finally:
        _release(path, handle)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file `path`; also if that cannot be told, because there are no locks here."""
    try:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        _lock(handle)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _acquire(path: Path, busy: str) -> int:
    handle = None
    while handle is None:
        handle = _open_locked(path, busy)
    return handle


def _release(path: Path, handle: int) -> None:
    if os.name == "nt":  # Windows cannot remove an open file; one that the next run has opened stays
        os.close(handle)
    with suppress(OSError):
        path.unlink()
    if os.name != "nt":  # unlink first, or another run could lock a file that is about to go
        os.close(handle)


def _open_locked(path: Path, busy: str) -> int | None:
    """The handle of the locked file; None if an ending run removed it or its folder at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except FileNotFoundError:
        return None
    except OSError:
        if path.is_symlink():
            raise UserError(f"{path} is a link, which a lock file never is: remove it") from None
        raise
    try:
        _lock(handle)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except FileNotFoundError:
        pass
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise UserError(busy) from None
    except OSError as error:
        _log.warning("%s: no file locks here (%s); do not start a second run in it", path.parent, error.strerror)
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
