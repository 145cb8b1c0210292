"""The worker process: it runs what it reads from stdin, one request after the other, and writes what comes of it."""

import importlib
import os
import pickle
import signal
import struct
import sys
import threading
import traceback
from queue import SimpleQueue

from lorawgpu.errors import UserError
from lorawgpu.guard import memory, status
from lorawgpu.guard.kept import enter
from lorawgpu.guard.limits import MAX_REPLY, STARTING

LENGTH = struct.Struct("<Q")  # before each frame
ITEM, DONE, RAISED, FAILED = range(4)  # kinds of reply
PR_SET_PDEATHSIG = 1


def main(parent: int, modules: tuple[str, ...]) -> None:
    """Serve until stdin ends. `parent`: the id of the process that started this one; `modules`: imported first."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its workers
    status.share(2)
    _end_with(parent)
    memory.limit_this_process()
    waiting: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests, waiting), daemon=True).start()
    for module in modules:
        importlib.import_module(module)
    while True:
        body = waiting.get()
        status.begin(work=STARTING)
        _serve(body, replies)
        del body


def _end_with(parent: int) -> None:
    if sys.platform == "linux":  # also while a library holds the interpreter; elsewhere `_receive` sees the pipe close
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _receive(requests, waiting: SimpleQueue) -> None:
    while head := requests.read(LENGTH.size):
        if len(head) == LENGTH.size:
            waiting.put(requests.read(LENGTH.unpack(head)[0]))
    os._exit(0)


def _serve(body: bytes, replies) -> None:
    try:
        folder, request = pickle.loads(body)
        enter(folder)
        function, args, streamed = pickle.loads(request)
        status.begin()
        result = function(*args)
        if streamed:
            for item in result:
                _send(replies, ITEM, item)
            result = None
        _send(replies, DONE, result)
    except UserError as error:
        memory.allow_work()
        _send(replies, RAISED, error)
    except BaseException as error:  # also the panics of libraries in Rust, which are no Exceptions
        trace = None if isinstance(error, MemoryError) else traceback.format_exc(limit=-20)
        text = f"{type(error).__name__}: {str(error)[:500]}"
        del error
        _send(replies, FAILED, (text if trace else None, trace))


def _send(replies, kind: int, value: object) -> None:
    body = pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL)
    if len(body) > MAX_REPLY:
        raise MemoryError
    replies.write(LENGTH.pack(len(body)))
    replies.write(body)
    replies.flush()
