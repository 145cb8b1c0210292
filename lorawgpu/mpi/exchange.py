"""An Exchange (engine/exchange.py) between the processes of an MPI job."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from lorawgpu.mpi.sentinel import Sentinel
from lorawgpu.mpi.watch import RankWatch
from lorawgpu.util.requests import SIGNAL

Result = TypeVar("Result")
SPIN = 2e-4  # seconds of polling before a wait sleeps: MPI libraries would spin all the time
LONGEST_SLEEP = 1e-3


class MpiExchange:
    """One rank of MPI_COMM_WORLD. It sends from rank to rank only, and sums nothing.

    All calls return at once and are made under one lock, so MPI_THREAD_SERIALIZED is enough. `names`: who the ranks
    are, for messages. `local_rank`: this rank's number among those of its machine.
    """

    def __init__(self, mpi):
        self._mpi, self._lock = mpi, threading.RLock()
        self.comm, self._bulk, beats = (mpi.COMM_WORLD.Dup() for _ in range(3))
        self.rank, self.size = self.comm.rank, self.comm.size
        node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank = node.rank
        self._sender, self._thread = ThreadPoolExecutor(1, "exchange"), threading.local()
        self.names = [f"rank {rank}" for rank in range(self.size)]
        self.sentinel = Sentinel(node)
        self.watch = RankWatch(mpi, beats, self._lock, self.names, self.sentinel.dismiss)
        self.watch.start()
        self.introduce("")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def introduce(self, adapter: str) -> None:
        """Tell all ranks this one's machine and adapter, for messages."""
        about = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}"
        self.names[:] = self.gather(f"{about}, {adapter}" if adapter else about)
        self._tell()

    def _tell(self) -> None:
        self.sentinel.tell(f"error: {self.names[self.rank]} died. {self.watch.fallback()}")

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every process, in rank order: whatever JSON can hold."""
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        return [json.loads(received.tobytes()) for received in self._all([data] * self.size)]

    def agree(self, request: int) -> int:
        """The weightiest request that any process has, or 0."""
        with self.watch.agreeing():
            found = max(self.gather(request))
        if found >= SIGNAL:
            self.watch.agreed()
        return found

    def broadcast(self, data: bytes | None) -> bytes:
        """The `data` of rank 0, on every rank."""
        mine = np.frombuffer(data or b"", np.uint8)
        return self._all([mine if self.leads else mine[:0]] * self.size)[0].tobytes()

    def _all(self, sends: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `swap`, for bytes whose number the receivers do not know."""
        lengths = [np.zeros(1, np.int64) for _ in sends]
        self.swap([np.array([len(send)], np.int64) for send in sends], lengths)
        received = [np.empty(int(length[0]), np.uint8) for length in lengths]
        self.swap(sends, received)
        return received

    def swap(self, sends: Sequence[np.ndarray], receives: Sequence[np.ndarray]) -> None:
        """Send `sends[j]` to rank j, and fill `receives[j]` with what rank j sends here."""
        byte, requests = self._mpi.BYTE, []
        comm = self._bulk if getattr(self._thread, "sends", False) else self.comm
        receives[self.rank][...] = sends[self.rank]
        others = [rank for rank in range(self.size) if rank != self.rank]
        with self._lock:
            for rank in others:
                if receives[rank].size:
                    requests.append(comm.Irecv([receives[rank], receives[rank].nbytes, byte], rank))
            for rank in others:
                if sends[rank].size:
                    requests.append(comm.Isend([sends[rank], sends[rank].nbytes, byte], rank))
        with self.watch.excused():
            self._wait(requests)

    def _wait(self, requests: list) -> None:
        start, pause = time.perf_counter(), SPIN / 4
        while True:
            try:
                with self._lock:
                    if self._mpi.Request.Testall(requests):
                        return
            except self._mpi.Exception as error:
                self.watch.lost(error)
            if time.perf_counter() - start > SPIN:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_SLEEP)

    def later(self, call: Callable[[], Result]) -> "Future[Result]":
        def run() -> Result:
            self._thread.sends = True
            return call()

        return self._sender.submit(run)

    def set_timeout(self, seconds: float) -> None:
        self.watch.timeout = seconds

    def judged(self, fallback: Callable[[], str]) -> AbstractContextManager:
        self.watch.fallback = fallback
        self._tell()
        return self.watch.judged()

    @contextmanager
    def working(self) -> Iterator[None]:
        with self.watch.excused():
            yield
            self._tell()  # there may be another checkpoint now

    def alive(self) -> None:
        self.watch.alive()

    def signalled(self, text: Callable[[], str], code: int) -> None:
        self.sentinel.dismiss()  # who sends a signal may well kill
        self.watch.signalled(text, code)

    def close(self) -> None:
        """Wait for all ranks, and end the heartbeat."""
        self.gather(None)
        self._sender.shutdown()
        self.watch.close()
        self.sentinel.dismiss()
