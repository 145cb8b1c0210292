"""A thread of each rank that notices when a rank dies, stops or hangs, and then ends the job with one message.

Each rank sends a heartbeat to the next one, which listens. It shows that the process lives, whatever its main thread
does. The main thread is judged by its own process: during a step it must say `alive` after each micro-batch, unless it
is `excused`: it does something long, or waits for other ranks.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

TIMEOUT = 120.0  # seconds, until the config is known
INTERVAL = 1.0  # seconds between heartbeats, at most
TICK = 0.05  # seconds between two looks of the thread
AGREE = 10.0  # seconds that a rank with a signal waits for the others
LEADER_FIRST = 2.0  # seconds; if all ranks have a signal, rank 0 ends the job before others report the same
GRACE = 5.0  # seconds for the launcher to end a job of which a rank died
FAILED = 3  # exit code: as if a device failed
BEAT, BYE, END = 0, 1, 2  # messages: I am alive; I end in good order; I end the job


class RankWatch(threading.Thread):
    """`names`: who the ranks are. `timeout`: seconds of silence that end the job. `fallback`: what is left then.

    at_end: called on each rank when one of them ends the job.
    """

    def __init__(self, mpi, comm, lock: threading.RLock, names: list[str], at_end: Callable[[], None]):
        super().__init__(daemon=True, name="watch")
        self._mpi, self._comm, self._lock, self._names, self._at_end = mpi, comm, lock, names, at_end
        self.timeout: float = TIMEOUT
        self.fallback: Callable[[], str] = lambda: ""
        self._excuses = 1  # until the first step
        self._alive = time.monotonic()
        self._closing = threading.Event()
        self._signal: tuple[Callable[[], str], int] | None = None
        self._deadline: float | None = None
        self.agree = AGREE + (0 if comm.rank == 0 else LEADER_FIRST)

    # Called by other threads

    def alive(self) -> None:
        self._alive = time.monotonic()

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Inside, the main thread must make progress."""
        self.alive()
        self._excuse(-1)
        try:
            yield
        finally:
            self._excuse(1)

    @contextmanager
    def excused(self) -> Iterator[None]:
        self._excuse(1)
        try:
            yield
        finally:
            self.alive()
            self._excuse(-1)

    def _excuse(self, change: int) -> None:
        with self._lock:
            self._excuses += change

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Waiting for other ranks at the border of a step: after a signal, for a few seconds only."""
        self._deadline = time.monotonic() + self.agree
        try:
            yield
        finally:
            self._deadline = None

    def signalled(self, text: Callable[[], str], code: int) -> None:
        """A signal asks this rank to stop. If it then waits for the others in vain, the job ends with `text`."""
        self._signal = text, code
        if self._deadline:
            self._deadline = time.monotonic() + self.agree

    def agreed(self) -> None:
        """All ranks know of the signal."""
        self._signal = None

    def abort(self, text: str, code: int) -> None:
        """End the job, with one message."""
        self._at_end()
        os.write(sys.__stderr__.fileno(), f"{text}\n".encode(errors="replace"))
        with suppress(self._mpi.Exception):  # the others may be gone
            self._tell_end()
        time.sleep(2 * TICK)
        self._mpi.COMM_WORLD.Abort(code)

    def _tell_end(self) -> None:
        with self._lock:
            others = set(range(self._comm.size)) - {self._comm.rank}
            told = [self._comm.Isend([bytes([END]), 1, self._mpi.BYTE], rank) for rank in others]
        until = time.monotonic() + LEADER_FIRST / 2
        while time.monotonic() < until:
            with self._lock:
                if self._mpi.Request.Testall(told):
                    break
            time.sleep(TICK)

    def lost(self, error: Exception) -> None:
        """MPI found that another rank is gone: the launcher ends the job now, or else this does."""
        time.sleep(GRACE)
        name = self._names[self._comm.rank]
        self.abort(f"error: {name} lost its connection to another rank: {error}. {self.fallback()}", FAILED)

    def close(self) -> None:
        """Say good-bye, and wait for that of the rank before."""
        self._closing.set()
        self.join(5)

    # The thread

    def run(self) -> None:
        try:
            self._listen()
        except self._mpi.Exception as error:
            self.lost(error)

    def _listen(self) -> None:
        rank, size, byte = self._comm.rank, self._comm.size, self._mpi.BYTE
        before, after = (rank - 1) % size, (rank + 1) % size
        inbox, sent, received = bytearray(1), None, None
        heard = looked = time.monotonic()
        due, left, gone = 0.0, False, False
        while not (left and gone):
            now = time.monotonic()
            if now - looked > self.timeout / 4:  # this process itself was stopped: it may judge nobody yet
                heard = self._alive = now
            looked = now
            with self._lock:
                if not gone:
                    received = received or self._comm.Irecv([inbox, 1, byte], self._mpi.ANY_SOURCE)
                    if received.Test():
                        received, heard, gone = None, now, inbox[0] == BYE
                        if inbox[0] == END:
                            self._at_end()
                closing = self._closing.is_set()
                if not left and (sent is None or sent.Test()) and (now >= due or closing):
                    left, due = closing, now + min(INTERVAL, self.timeout / 4)
                    sent = self._comm.Isend([bytes([BYE if left else BEAT]), 1, byte], after)
            if not gone and now - heard > self.timeout:
                self._fail(f"no sign of life from {self._names[before]} for {self.timeout:g} s: it stopped or died")
            self._judge(now)
            time.sleep(TICK)

    def _judge(self, now: float) -> None:
        if self._excuses <= 0 and now - self._alive > self.timeout:
            self._fail(
                f"{self._names[self._comm.rank]} made no progress for {self.timeout:g} s: most likely its device hangs "
                "(exchange_timeout_s must be longer than a micro-batch takes)"
            )
        deadline = self._deadline
        if self._signal and deadline and now > deadline:
            text, code = self._signal
            self.abort(text(), code)

    def _fail(self, text: str) -> None:
        self.abort(f"error: {text}. {self.fallback()}", FAILED)
