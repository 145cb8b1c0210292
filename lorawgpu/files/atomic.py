"""Files that are whole or absent, whatever happens while they are written."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut. Windows cannot open folders and journals names by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write and force to disk; for files in a folder that nobody reads yet. OSError names the file."""
    try:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # of a write that found the disk full, Python keeps no name
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write beside `path`, force to disk, rename over it: a reader sees the old bytes or the new. OSError otherwise."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        write_synced(beside, data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
