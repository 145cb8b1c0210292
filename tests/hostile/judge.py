"""Reads each file in a forked child that is measured and limited, and says what became of it.

`python -m hostile.judge`: lines of {"kind", "path"} in, lines of Verdict out. Linux only (/proc, fork).
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

SECONDS = 20  # of one file
SPARE = 4 << 30  # address space beyond what the reader starts with: an endless allocation ends in MemoryError


@dataclass(frozen=True)
class Verdict:
    """`outcome`: loaded, refused, or what is wrong: crashed, died, hung. `peak`: bytes the reader needed at most."""

    outcome: str
    message: str
    seconds: float
    peak: int


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def child(reader, path: Path, pipe: int) -> None:
    """Read, write the verdict's first half to `pipe`, and end without any clean-up of the parent's."""
    from lorawgpu.errors import UserError

    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + SPARE,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, outcome, message = memory("VmRSS"), "loaded", ""
    try:
        reader(path)
    except (UserError, OSError) as error:  # the errors that commands turn into one message
        outcome, message = "refused", str(error)
    except BaseException as error:  # a traceback for the user: what the corpus looks for
        outcome, message = "crashed", f"{type(error).__name__}: {error}"
    peak = max(0, memory("VmHWM") - before)
    os.write(pipe, json.dumps([outcome, message[:2000], peak]).encode())
    os._exit(0)


def judge(reader, path: Path) -> Verdict:
    began, (receive, send) = time.monotonic(), os.pipe()
    pid = os.fork()
    if pid == 0:
        child(reader, path, send)
    os.close(send)
    hung = not select.select([receive], [], [], SECONDS)[0]
    said = b"" if hung else os.read(receive, 1 << 16)
    if hung:
        os.kill(pid, signal.SIGKILL)
    os.close(receive)
    status = os.waitpid(pid, 0)[1]
    seconds = time.monotonic() - began
    if hung:
        return Verdict("hung", f"no end after {SECONDS} s", seconds, 0)
    if not said:
        return Verdict("died", f"signal {os.WTERMSIG(status)}", seconds, 0)
    outcome, message, peak = json.loads(said)
    return Verdict(outcome, message, seconds, peak)


def judge_here(reader, path: Path) -> Verdict:
    """A reader whose work a guarded worker does: this process must be none the worse for it."""
    from lorawgpu.errors import UserError

    Path("/proc/self/clear_refs").write_text("5")
    before, began, outcome, message = memory("VmRSS"), time.monotonic(), "loaded", ""
    try:
        reader(path)
    except (UserError, OSError) as error:
        outcome, message = "refused", str(error)
    except BaseException as error:
        outcome, message = "crashed", f"{type(error).__name__}: {error}"
    return Verdict(outcome, message[:2000], time.monotonic() - began, max(0, memory("VmHWM") - before))


def serve() -> None:
    """Judge what stdin names. All that readers import is imported before the first fork."""
    import gguf  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import zstandard  # noqa: F401

    from hostile.readers import GUARDED, READERS
    from lorawgpu.guard import limits

    limits.SECONDS = (60.0, 5.0, 2.0, 0.5, 1.0, 1.0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        reader = READERS[request["kind"]]
        verdict = (judge_here if reader in GUARDED else judge)(reader, Path(request["path"]))
        print(json.dumps(asdict(verdict)), file=answers, flush=True)


class Judge:
    """The serving process; a context manager."""

    def __enter__(self) -> "Judge":
        tests = str(Path(__file__).parent.parent)
        settings = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        settings |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # its own pools reserve more address space than SPARE
        path = os.pathsep.join(filter(None, [tests, str(Path(tests).parent), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "hostile.judge"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, env=os.environ | settings | {"PYTHONPATH": path}, **pipes)
        return self

    def __call__(self, kind: str, path: Path) -> Verdict:
        print(json.dumps({"kind": kind, "path": str(path)}), file=self.process.stdin, flush=True)
        return Verdict(**json.loads(self.process.stdout.readline()))

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        self.process.wait(10)


if __name__ == "__main__":
    serve()
