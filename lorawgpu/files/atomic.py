"""Writing files atomically: after a crash they are complete or absent.

What is not complete yet has a hidden name with a random mark (`.report.html.<16 hex digits>.partial`) and is created
exclusively, so that nobody can put a link in its place. Only names with such a mark are ever swept away.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_MARKED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.(?P<state>[a-z]+)", re.DOTALL)


def marked(path: Path, state: str) -> Path:
    """A new hidden sibling of `path`; `state` says what becomes of it: "partial", for instance."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{state}")


def find_marked(folder: Path, state: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of everything in `folder` that `marked` named with this state. Links are none of ours."""
    for path in sorted(folder.glob(f".*.{state}")):
        match = _MARKED.fullmatch(path.name)
        if match and match["state"] == state and not path.is_symlink():
            yield match["name"], path


def sweep_marked(folder: Path, names: re.Pattern, states: tuple[str, ...] = ("partial",)) -> None:
    """Remove what interrupted writes of `names` left in `folder`. OSError, naming the path, if that fails."""
    for state in states:
        for name, path in find_marked(folder, state):
            if names.fullmatch(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


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
    """Create a file that nobody reads yet, write and fsync it. OSError, naming it, also if it exists already."""
    try:
        with open(path, "xb") as file:  # x: a link is never followed
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a failed write, as on a full disk, does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file, fsync, rename it to `path`: a reader sees the old or the new bytes, never a mix.

    OSError names `path`, not the temporary file.
    """
    partial = marked(path, "partial")
    try:
        write_synced(partial, data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
