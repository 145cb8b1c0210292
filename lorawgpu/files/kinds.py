"""What a path is that is not the file that was wanted."""

import os
import stat
from pathlib import Path

_ONCE = "save what it gives in a file, and name that"
_KINDS = (
    (stat.S_ISFIFO, f"a named pipe, which can be read only once: {_ONCE}"),
    (stat.S_ISSOCK, f"a socket: {_ONCE}"),
    (stat.S_ISCHR, f"a device: {_ONCE}"),
    (stat.S_ISBLK, f"a device: {_ONCE}"),
    (stat.S_ISDIR, "a folder, not a file"),
)


def why_no_file(path: Path, absent: str = "no such file") -> str:
    """Why `path` is not a regular file; `absent`: what to say if nothing has this name."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return "a link to a file that is not there" if os.path.islink(path) else absent
    return next((f"this is {what}" for is_kind, what in _KINDS if is_kind(mode)), absent)
