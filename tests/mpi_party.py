"""One rank of an MPI job without a GPU, which plays the part that its argument names. For tests/test_ranks.py."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from lorawgpu.cli import main_of
from lorawgpu.errors import DeviceError, UserError
from lorawgpu.train.ranks import companions, from_leader, in_turns, require_same, together
from lorawgpu.util.requests import SIGNAL

FALLBACK = "The last good checkpoint is checkpoint-7"


def swap(exchange):
    """Arrays of all lengths arrive where they belong, from a second thread too; text and bytes as well."""
    rank, size = exchange.rank, exchange.size
    sends = [np.arange(1000 * other + rank, dtype=np.float32) for other in range(size)]
    receives = [np.empty(1000 * rank + other, np.float32) for other in range(size)]
    exchange.later(lambda: exchange.swap(sends, receives)).result()
    assert all(np.array_equal(got, np.arange(len(got))) for got in receives)
    assert exchange.gather({"rank": rank, "big": 2**70}) == [{"rank": r, "big": 2**70} for r in range(size)]
    assert from_leader(exchange, lambda: ("text", np.ones(3)))[1].sum() == 3
    assert together(exchange, lambda: rank) == rank
    print("swapped", exchange.names)


def take_turns(exchange):
    """Rank 0 tokenizes, and the others find what it wrote; where the folder is not shared, each machine works."""
    folder = Path(os.environ["FOLDER"])

    def work():
        found = sorted(path.name for path in folder.glob("store-*"))
        (folder / f"store-{exchange.rank}").touch()
        return found

    found = exchange.gather(in_turns(exchange, work, folder))
    assert found[0] == [] and all("store-0" in names for names in found[1:])
    assert not list(folder.glob(".lorawgpu-*"))  # the mark by which they know that it is shared
    if exchange.rank:
        exchange.local_rank = 0  # as on another machine
    found = exchange.gather(in_turns(exchange, lambda: exchange.rank, folder / str(exchange.rank)))
    assert found == list(range(exchange.size))
    print("took turns")


def fail_at_start(exchange):
    def work():
        if exchange.rank == 1:
            raise DeviceError("out of GPU memory: weights need 9 bytes")

    together(exchange, work)


def fail_all(exchange):
    def work():
        raise UserError("no such model")

    together(exchange, work)


def differ(exchange):
    require_same(exchange, "config", {"seed": 1, "learning_rate": 0.1 * (exchange.rank + 1)})


def fail_later(exchange):
    """An error of one rank while the others wait for it."""
    if exchange.rank == 1:
        raise DeviceError("the device was lost")
    exchange.gather(None)


def bug(exchange):
    if exchange.rank == 1:
        raise ZeroDivisionError("a bug")
    exchange.gather(None)


def stop(exchange):
    """A process that is stopped, as by a machine that sleeps, sends no heartbeat."""
    exchange.set_timeout(3)
    with exchange.judged(lambda: FALLBACK):
        if exchange.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        exchange.gather(None)


def hang(exchange):
    """A process whose main thread waits for a device that does not answer."""
    exchange.set_timeout(3)
    with exchange.judged(lambda: FALLBACK):
        if exchange.rank == 1:
            threading.Event().wait()
        exchange.gather(None)


def die(exchange):
    """A process that is gone at once, as after a SIGKILL of the system that lacks memory."""
    exchange.introduce("llvmpipe")
    with exchange.judged(lambda: FALLBACK):
        if exchange.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.gather(None)


def work_long(exchange):
    """Long work that is no step is no silence, on any rank; nor is waiting for it."""
    exchange.set_timeout(3)
    with exchange.judged(lambda: FALLBACK):
        with exchange.working():
            time.sleep(5 * exchange.rank)
        exchange.gather(None)
    print("worked")


def signalled(exchange):
    """A rank that is asked to stop, while the other one does not answer."""
    exchange.watch.agree = 1.0
    with exchange.judged(lambda: FALLBACK):
        if exchange.rank == 1:
            time.sleep(60)
        exchange.signalled(lambda: "SIGTERM: nothing was saved", 143)
        exchange.agree(SIGNAL + 15)


def agree(exchange):
    """A signal to one rank reaches all; then each may take its time."""
    exchange.watch.agree = 1.0
    if exchange.rank == 1:
        exchange.signalled(lambda: "nobody agreed", 143)
    assert exchange.agree((SIGNAL + 15) * exchange.rank) == SIGNAL + 15
    time.sleep(2.5 * exchange.rank)
    assert exchange.agree(0) == 0
    print("agreed")


def run(argv):
    with companions() as exchange:
        globals()[argv[0]](exchange)


if __name__ == "__main__":
    sys.exit(main_of(run)())
