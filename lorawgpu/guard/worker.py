"""Worker processes as seen from the process that starts them."""

import atexit
import json
import logging
import mmap
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from lorawgpu.errors import UserError
from lorawgpu.guard import limits, status
from lorawgpu.guard.child import DONE, FAILED, ITEM, LENGTH, RAISED
from lorawgpu.guard.kept import current_folder
from lorawgpu.guard.limits import LOADING, STARTING, WORK
from lorawgpu.guard.memory import resident

TICK = 0.05  # seconds between two looks at a worker that is busy
# The search path comes first: the child finds the package, and what it imports, where this process found them.
START = "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); from lorawgpu.guard import child; "
ALONE = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
         "ARROW_DEFAULT_MEMORY_POOL": "system"}  # fmt: skip
_log = logging.getLogger(__name__)


class WorkerStopped(UserError):
    """An item met a limit, or ended its worker. `line`: which one, 0 if it has none. The caller adds the file."""

    def __init__(self, why: str, line: int = 0):
        super().__init__(why)
        self.why, self.line = why, line

    def __reduce__(self):
        return WorkerStopped, (self.why, self.line)


class Worker:
    """A process that works on one request at a time. It is started on first use, and again after it was stopped."""

    def __init__(self):
        self._lock = threading.RLock()
        self._process: _Process | None = None

    def start(self, *modules: str) -> None:
        """Start the process now, unless it runs, and do not wait for it. `modules`: what it imports meanwhile."""
        with self._lock:
            if self._process is None or not self._process.usable():
                self.close()
                self._process = _Process(modules)

    def call(self, function: Callable, *args: object) -> object:
        """`function(*args)`, computed there. WorkerStopped if it meets a limit; a UserError is raised as it is."""
        with self._lock:
            process = self._ask(function, args, False)
            return self._reply(process)[1]

    def stream(self, function: Callable, *args: object) -> Iterator:
        """The items of the iterator `function(*args)`, as they come."""
        with self._lock:
            process = self._ask(function, args, True)
            done = False
            try:
                while not done:
                    kind, value = self._reply(process)
                    done = kind == DONE
                    if not done:
                        yield value
            except UserError:
                done = True  # of the function: the process is ready for the next one
                raise
            finally:
                if not done:
                    self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process:
            process.close()

    def _ask(self, function: Callable, args: tuple, streamed: bool) -> "_Process":
        request = pickle.dumps((function, args, streamed), pickle.HIGHEST_PROTOCOL)
        body = pickle.dumps((current_folder(), request), pickle.HIGHEST_PROTOCOL)
        self.start()
        if not self._process.send(body):  # it ended while it had nothing to do
            self.close()
            self.start()
            self._process.send(body)
        return self._process

    def _reply(self, process: "_Process") -> tuple[int, object]:
        try:
            kind, value = process.reply()
        except BaseException:  # WorkerStopped, or Ctrl-C
            self.close()
            raise
        if kind in (DONE, ITEM):
            return kind, value
        if kind == RAISED:
            raise value
        assert kind == FAILED
        text, trace = value
        stopped = process.stopped(f"failed ({text})" if text else process.too_large())
        self.close()
        if trace:
            _log.debug("in a worker: %s", trace)
            stopped.add_note(trace)
        raise stopped


class _Process:
    def __init__(self, modules: tuple[str, ...]):
        self.owner = os.getpid()
        try:
            self.log = tempfile.TemporaryFile(mode="a+b", prefix="lorawgpu-worker-")
            self.log.write(bytes(status.SIZE))
            self.log.flush()
            self.shared = mmap.mmap(self.log.fileno(), status.SIZE)
        except OSError as error:
            raise UserError(f"{tempfile.gettempdir()}: no file for a worker process: {error.strerror}") from None
        self.popen: subprocess.Popen | None = None
        self.held, self.loaded = 0, True
        self.frames: queue.Queue[bytes | OSError | None] = queue.Queue(2)
        # The thread that starts a process on Linux has to outlive it (PR_SET_PDEATHSIG): a user's thread may not.
        started = threading.Event()
        threading.Thread(target=self._run, args=(started, modules), daemon=True, name="worker").start()
        started.wait()
        if self.popen is None:
            raise UserError(f"{sys.executable}: a worker process cannot be started: {self.frames.get()}")
        self._write(json.dumps([os.fspath(path) for path in sys.path]).encode() + b"\n")

    def usable(self) -> bool:
        """Whether it runs and is ours: after a fork it is the parent's."""
        return self.owner == os.getpid() and self.popen.poll() is None

    def send(self, body: bytes) -> bool:
        self.held = resident(self.popen.pid)
        return self._write(LENGTH.pack(len(body)) + body)

    def reply(self) -> tuple[int, object]:
        """The next reply. WorkerStopped if an item takes longer or more memory than it may, or if the process ends."""
        seen, since = None, time.monotonic()
        while True:
            try:
                body = self.frames.get(timeout=TICK)
            except queue.Empty:
                now = status.read(self.shared)
                if now.items != seen:
                    seen, since = now.items, time.monotonic()
                self.loaded |= now.work in (STARTING, LOADING)
                if time.monotonic() - since > limits.SECONDS[now.work]:
                    raise self.stopped(f"took longer than {limits.SECONDS[now.work]:g} s") from None
                if resident(self.popen.pid) > self.held + limits.MEMORY + (limits.LOADING_MEMORY if self.loaded else 0):
                    raise self.stopped(self.too_large()) from None
                continue
            if body is None:
                raise self.stopped(self._end())
            return pickle.loads(body)

    def stopped(self, why: str) -> WorkerStopped:
        now = status.read(self.shared)
        return WorkerStopped(f"{WORK[now.work]} {why}", now.line)

    def too_large(self) -> str:
        loading = status.read(self.shared).work == LOADING
        return f"took more than {(limits.LOADING_MEMORY if loading else limits.MEMORY) // limits.MIB} MiB of memory"

    def close(self) -> None:
        if self.owner == os.getpid():
            self.popen.kill()
            self.popen.wait()
            for pipe in (self.popen.stdin, self.log):
                try:
                    pipe.close()
                except OSError:  # a request that nobody read
                    pass
            while not self.frames.empty():  # `_receive` may wait for room
                self.frames.get_nowait()

    def _end(self) -> str:
        """Why the process ended by itself."""
        code = self.popen.wait()
        self.log.seek(status.SIZE)
        text = self.log.read(1 << 20).decode("utf-8", "replace").replace("\0", "").strip()
        if "memory allocation of" in text or "MemoryError" in text or code == -9:
            return self.too_large()
        last = text.splitlines()[-1][:200] if text else ""
        return f"ended its process (exit code {code}{': ' if last else ''}{last})"

    def _write(self, data: bytes) -> bool:
        try:
            self.popen.stdin.write(data)
            self.popen.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def _run(self, started: threading.Event, modules: tuple[str, ...]) -> None:
        """Start the process and pass its replies on until it ends."""
        command = [sys.executable, "-c", f"{START}child.main({self.owner}, {modules})"]
        hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        try:
            self.popen = subprocess.Popen(command, env={**ALONE, **os.environ}, creationflags=hidden, **pipes)
        except OSError as error:
            return self.frames.put(error)
        finally:
            started.set()
        with self.popen.stdout as pipe:
            while len(head := pipe.read(LENGTH.size)) == LENGTH.size:
                size = LENGTH.unpack(head)[0]
                body = pipe.read(size) if size <= limits.MAX_REPLY else b""
                if len(body) < size:
                    break
                self.frames.put(body)
        self.frames.put(None)


_worker = Worker()
atexit.register(lambda: _worker.close())


def shared_worker() -> Worker:
    """The worker of this process, for everything but large files."""
    return _worker


def call(function: Callable, *args: object) -> object:
    """`Worker.call` with the worker of this process."""
    return _worker.call(function, *args)
