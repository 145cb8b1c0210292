"""Writing files atomically: after a crash they are complete or absent."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut. Windows cannot open folders, and journals names by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write and fsync, for a file that nobody reads yet. OSError, naming the file."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a failed write, as on a full disk, does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file, fsync, rename it to `path`: a reader sees the old or the new bytes, never a mix."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_synced(partial, data)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
