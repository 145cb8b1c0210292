"""Standard streams that are closed, full, or a pipe that nobody reads any more."""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

from lorawgpu.util.printable import printable

STDOUT, STDERR = "standard output", "standard error"


class Guarded:
    """A stream whose errors name it. If `lasting`, an error does not end the command: further output is discarded."""

    def __init__(self, stream, name: str, lasting: bool):
        self._stream, self._name, self._lasting = stream, name, lasting

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._guard():
            try:
                self._stream.write(printable(text, progress=True) if self._name == STDERR else text)
            except UnicodeEncodeError:  # half a surrogate pair
                self._stream.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        return len(text)

    def flush(self) -> None:
        with self._guard():
            self._stream.flush()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            discard(self._stream)
            if not self._lasting:
                raise type(error)(error.errno, error.strerror, self._name) from None
            if not isinstance(error, BrokenPipeError):
                print(f"note: {self._name}: {error.strerror}; continuing without it", file=sys.stderr)
        except RuntimeError:  # a signal handler's message in the middle of a write: Python forbids nested writes
            if not self._lasting:
                raise


def discard(stream) -> None:
    """Discard all further output, and what is in the buffer, which Python's final flush could not write."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_closed() -> None:
    """Open closed streams (`>&-`) on the null device; otherwise the next file opened would get their number, and a
    driver's prints would go into that file. `sys.stdin` stays None, so commands still know that there is no stdin."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if name != "stdin" and getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", errors="replace", closefd=False))


def print_anything() -> None:
    """Print "?" for what stdout or stderr cannot encode (pipes on Windows are cp1252) instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            if stream.errors in ("strict", "surrogateescape"):  # anything else was set by the user
                stream.reconfigure(errors="replace")


@contextmanager
def guarded() -> Iterator[None]:
    """Guard the streams of a command: a failing stderr does not end it, and an error of stdout names it."""
    out, err = Guarded(sys.stdout, STDOUT, False), Guarded(sys.stderr, STDERR, True)
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def lasting_stdout() -> Iterator[None]:
    """For work that matters more than its output: a failing stdout does not end it."""
    with redirect_stdout(Guarded(sys.stdout, STDOUT, True)):
        yield
