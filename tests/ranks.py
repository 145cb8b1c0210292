"""Processes that train together, played by threads of this one: an Exchange over host memory."""

import threading
from contextlib import nullcontext

from lorawgpu.engine.exchange import at_once


class Ranks:
    """`size` ranks, of which one runs at a time: until it exchanges something, then the next one does."""

    def __init__(self, size: int):
        self.size, self.alive, self.turn = size, list(range(size)), 0
        self.parts, self.failed = [], None
        self._changed = threading.Condition()

    def run(self, work) -> list:
        """What `work(exchange)` returns on each rank; raises what the first of them raised."""
        results = [None] * self.size

        def one(rank):
            self._wait(rank)
            try:
                results[rank] = work(Rank(self, rank))
            except BaseException as error:
                self.failed = self.failed or error
            finally:
                self._pass_on(rank, ends=True)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed
        return results

    def gather(self, rank: int, part) -> list:
        """The parts of all ranks in rank order."""
        parts = self.parts
        parts.append(part)
        if len(parts) == self.size:
            self.parts = []
        self._pass_on(rank)
        self._wait(rank)
        if len(parts) != self.size:
            raise RuntimeError(f"rank {rank} waits for ranks that have ended")
        return parts

    def _wait(self, rank: int):
        with self._changed:
            self._changed.wait_for(lambda: self.turn == rank)

    def _pass_on(self, rank: int, ends: bool = False):
        with self._changed:
            following = self.alive[(self.alive.index(rank) + 1) % len(self.alive)]
            if ends:
                self.alive.remove(rank)
            self.turn = following
            self._changed.notify_all()


class Rank:
    """An Exchange (engine/exchange.py)."""

    def __init__(self, ranks: Ranks, rank: int):
        self.ranks, self.rank, self.size, self.leads = ranks, rank, ranks.size, rank == 0
        self.local_rank, self.names = rank, [f"rank {number}" for number in range(ranks.size)]

    def gather(self, value):
        return self.ranks.gather(self.rank, value)

    def agree(self, signum):
        return max(self.gather(signum))

    def swap(self, sends, receives):
        for received, theirs in zip(receives, self.ranks.gather(self.rank, sends), strict=True):
            received[...] = theirs[self.rank]

    def later(self, call):
        return at_once(call)

    def judged(self, fallback):
        return nullcontext()

    def working(self):
        return nullcontext()

    def alive(self):
        pass

    def signalled(self, text, code):
        pass
