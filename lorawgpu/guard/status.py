"""What a worker is doing, in memory that it shares with the process that waits for it. Writing it costs 0.2 us."""

import mmap
import struct
from typing import NamedTuple

from lorawgpu.guard.limits import LOADING, READING

_FIELDS = struct.Struct("<qqq")
SIZE = 4096  # of the shared memory, a file: a page
_shared: bytearray | mmap.mmap = bytearray(SIZE)  # of this process, if it is no worker
_items = 0


class Status(NamedTuple):
    """`items`: how many were begun; `line`: the one at work, 0 if it has none; `work`: a number of `limits.WORK`."""

    items: int
    line: int
    work: int


def share(file: int) -> None:
    """Write into this file from now on."""
    global _shared
    _shared = mmap.mmap(file, SIZE)


def begin(line: int = 0, work: int = READING) -> None:
    """The next item begins: its time starts now."""
    global _items
    _items += 1
    _FIELDS.pack_into(_shared, 0, _items, line, work)


def doing(work: int) -> int:
    """The same item, other work; loading has a time of its own. Returns what it was before."""
    global _items
    _, line, before = _FIELDS.unpack_from(_shared)
    _items += LOADING in (before, work)
    _FIELDS.pack_into(_shared, 0, _items, line, work)
    return before


def read(shared: bytearray | mmap.mmap) -> Status:
    return Status(*_FIELDS.unpack_from(shared))
