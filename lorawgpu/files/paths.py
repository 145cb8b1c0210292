"""Names of files as people write them."""

import os
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief


def expand(name: str | Path) -> Path:
    """`name` as a path, with `~` as the home folder; `~` stays as it is where there is none, or no such user.

    UserError for a name that no file can have: with a NUL, or with half a surrogate pair.
    """
    text = str(name)
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError
    except ValueError:
        raise UserError(f"{brief(text)}: no file can have this name") from None
    return Path(os.path.expanduser(text))


def absolute(name: str, folder: Path | None = None) -> str:
    """`name` as an absolute path that a config can hold, relative to `folder` (default: the current directory).

    UserError as `expand`, and for a path that is not UTF-8, as a folder above may be.
    """
    path = os.path.abspath((folder or Path.cwd()) / expand(name))
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f"{brief(path)}: the name is not UTF-8, so no config can hold it; rename that folder") from None
    return path


def default_cache_dir() -> Path | None:
    """`LORAWGPU_CACHE`, or else `lorawgpu` in the user's cache directory; None for a user without a home."""
    if chosen := os.environ.get("LORAWGPU_CACHE"):
        return Path(chosen)
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or (home != "~" and os.path.join(home, ".cache"))
    return Path(caches) / "lorawgpu" if caches else None
