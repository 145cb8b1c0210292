"""Digests of whole files, remembered while a file keeps its size and times: hashing 16 GB takes seconds."""

import hashlib
import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.util.threads import InOrder

PIECE = 64 << 20
MEMORY_FILE = "digests.json"
MAX_REMEMBERED = 1000


def whole_digest(path: Path) -> str:
    """SHA-256 of the SHA-256 of each 64 MiB piece of a file, computed in threads. OSError if it cannot be read."""
    whole = hashlib.sha256()
    with InOrder() as pieces:
        for start in range(0, path.stat().st_size, PIECE):
            pieces.put(partial(_piece, path, start), whole.update)
    return whole.hexdigest()


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(PIECE)).digest()


def remembered_digest(path: Path, cache: Path | None) -> str:
    """`whole_digest`, from `digests.json` in the folder `cache` if the file has not changed since it was computed.

    Changed means another size, inode, or time of the last change; the system sets that time, so a tool that puts back
    the modification time does not hide a change. OSError if the file cannot be read; a cache that cannot be written is
    not used, and None is none.
    """
    if cache is None:
        return whole_digest(path)
    key, seen = str(path.resolve()), _state(path)
    remembered = _remembered(cache)
    entry = remembered.get(key)
    if isinstance(entry, list) and entry[:-1] == seen:
        return str(entry[-1])
    digest = whole_digest(path)
    if _state(path) == seen:
        others = {k: v for k, v in remembered.items() if k != key}
        recent = dict(list(others.items())[1 - MAX_REMEMBERED :]) | {key: [*seen, digest]}
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            replace_file(cache / MEMORY_FILE, json.dumps(recent, indent=0).encode("utf-8", "surrogateescape"))
    return digest


def _state(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(cache: Path) -> dict:
    try:
        return read_json_object(cache / MEMORY_FILE)
    except UserError:  # none yet, or damaged
        return {}
