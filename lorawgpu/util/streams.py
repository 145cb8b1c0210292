"""Standard input, output and error that are closed, full, or a pipe that nobody reads any more."""

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

STDOUT, STDERR = "standard output", "standard error"


class Guarded:
    """A stream whose failures are named after it, or, where it is `lasting`, end nothing: what is written after the
    first failure goes nowhere."""

    def __init__(self, stream, name: str, lasting: bool):
        self._stream, self._name, self._lasting = stream, name, lasting

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._guard():
            self._stream.write(text)
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
                print(f"note: {self._name}: {error.strerror}; this goes on without it", file=sys.stderr)
        except RuntimeError:  # a signal's notice in the middle of another line: Python allows no write within a write
            if not self._lasting:
                raise


def discard(stream) -> None:
    """What is written from now on goes nowhere, with what waits in the buffer: Python's flush at its end would fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def open_closed() -> None:
    """Open what was closed (`>&-`) as nowhere: else the next file opened would take its number, and what a driver
    prints would go into that file. That there is no stdin stays known: `sys.stdin` is None."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if name != "stdin" and getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", errors="replace", closefd=False))


def print_anything() -> None:
    """A "?" for what stdout or stderr cannot encode (a pipe on Windows is cp1252), not a traceback halfway."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            if stream.errors in ("strict", "surrogateescape"):  # anything else is what the user asked for
                stream.reconfigure(errors="replace")


@contextmanager
def guarded() -> Iterator[None]:
    """The streams of a command: notes and progress on stderr never end it; a failing stdout is named."""
    out, err = Guarded(sys.stdout, STDOUT, False), Guarded(sys.stderr, STDERR, True)
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def lasting_stdout() -> Iterator[None]:
    """What is worth more than its words: stdout may fail without ending it."""
    with redirect_stdout(Guarded(sys.stdout, STDOUT, True)):
        yield
