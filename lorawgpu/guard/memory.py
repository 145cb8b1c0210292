"""The memory of a process: a limit on one's own, where the system has one, and the size of another's."""

import ctypes
import sys
from functools import cache

from lorawgpu.guard.limits import LOADING_MEMORY, MEMORY

try:
    import resource
except ImportError:  # Windows
    resource = None

_limited = False  # this process is a worker on a system that enforces RLIMIT_DATA


def limit_this_process() -> None:
    """A worker gets enough for work from now on, and writes no files: nothing beyond its log, and no core dump."""
    global _limited
    if resource:
        _set_soft("RLIMIT_FSIZE", 1 << 20)
        _set_soft("RLIMIT_CORE", 0)
    _limited = sys.platform == "linux"
    allow_work()


def allow_loading() -> None:
    """Until `allow_work`: enough for loading an object."""
    _allow(LOADING_MEMORY)


def allow_work(more: int = 0) -> None:
    """From what is held now on: enough for one item, and `more` bytes."""
    _allow(MEMORY + more)


def _allow(size: int) -> None:
    if _limited:
        with open("/proc/self/statm", "rb") as file:
            held = int(file.read().split()[5]) * resource.getpagesize()
        _set_soft("RLIMIT_DATA", held + size)


def _set_soft(name: str, size: int) -> None:
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def resident(pid: int) -> int:
    """Bytes of memory that a child process holds now; 0 if the system does not tell."""
    try:
        if sys.platform == "linux":
            with open(f"/proc/{pid}/statm", "rb") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        return {"darwin": _resident_macos, "win32": _resident_windows}[sys.platform](pid)
    except (OSError, IndexError, KeyError, AttributeError):
        return 0


class _RusageInfo(ctypes.Structure):
    """`struct rusage_info_v0` of <sys/resource.h>."""

    _fields_ = [("uuid", ctypes.c_uint8 * 16), ("times", ctypes.c_uint64 * 5), ("wired", ctypes.c_uint64),
                ("resident", ctypes.c_uint64), ("footprint", ctypes.c_uint64),
                ("rest", ctypes.c_uint64 * 2)]  # fmt: skip


@cache
def _libproc():
    return ctypes.CDLL("/usr/lib/libproc.dylib")


def _resident_macos(pid: int) -> int:
    info = _RusageInfo()
    return 0 if _libproc().proc_pid_rusage(pid, 0, ctypes.byref(info)) else info.resident


class _Counters(ctypes.Structure):
    """`PROCESS_MEMORY_COUNTERS` of <psapi.h>."""

    _fields_ = [("size", ctypes.c_uint32), ("faults", ctypes.c_uint32), ("peak", ctypes.c_size_t),
                ("resident", ctypes.c_size_t), ("pools", ctypes.c_size_t * 4), ("pagefile", ctypes.c_size_t),
                ("peak_pagefile", ctypes.c_size_t)]  # fmt: skip


def _resident_windows(pid: int) -> int:
    kernel, counters = ctypes.windll.kernel32, _Counters(size=ctypes.sizeof(_Counters))
    kernel.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel.OpenProcess(0x1000, False, pid))  # PROCESS_QUERY_LIMITED_INFORMATION
    try:
        found = kernel.K32GetProcessMemoryInfo(handle, ctypes.byref(counters), counters.size)
        return max(counters.resident, counters.pagefile) if found else 0
    finally:
        kernel.CloseHandle(handle)
