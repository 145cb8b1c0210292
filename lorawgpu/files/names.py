"""Names for new files."""

import re


def stem_of(name: str) -> str:
    """A name for files, of a path, a built-in or a hub name."""
    last = re.split(r"[/\\:]", name.rstrip("/\\"))[-1]
    return re.sub(r"\W+", "-", last.split(".")[0]).strip("-") or "run"
