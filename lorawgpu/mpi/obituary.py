"""Says which rank died: `python obituary.py SOCKET RANKS`, a process that outlives the ranks of its machine.

Many launchers kill all ranks as soon as one is gone, so none of them could tell. Each rank of the machine connects to
the listening socket that is file descriptor SOCKET, and sends lines; the last one is what to print if the connection
ends without `bye`. The first rank that dies is named; those that the launcher kills then are not.
"""

import os
import select
import signal
import socket
import sys

BYE = b"bye"
LONGEST = 1 << 16  # bytes of what a rank said that are kept


class Poll:
    """Linux reports what happened first first, however late this process gets its turn; others in any order."""

    def __init__(self):
        self._epoll, self._sources = select.epoll() if hasattr(select, "epoll") else None, {}

    def add(self, source: socket.socket) -> None:
        self._sources[source.fileno()] = source
        if self._epoll:
            self._epoll.register(source, select.EPOLLIN)

    def wait(self) -> list[socket.socket]:
        numbers = self._epoll.poll() if self._epoll else [(n, 0) for n in select.select(self._sources, [], [])[0]]
        return [self._sources[number] for number, _ in numbers]

    def remove(self, source: socket.socket) -> None:
        del self._sources[source.fileno()]
        if self._epoll:
            self._epoll.unregister(source)


def first_to_die(listener: socket.socket, ranks: int) -> bytes | None:
    """The last line of the first of `ranks` connections that ends without `bye`; None if all say it."""
    poll, said, left = Poll(), {}, ranks
    poll.add(listener)
    while left:
        for source in poll.wait():
            if source is listener:
                rank, _ = listener.accept()
                poll.add(rank)
                rank.send(b"\n")
                said[rank] = b""
            elif data := source.recv(LONGEST):
                said[source] = (said[source] + data)[-LONGEST:]
            else:
                last = b"".join(said[source].split(b"\n")[-2:-1])
                if last != BYE:
                    return last
                poll.remove(source)
                left -= 1
    return None


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if text := first_to_die(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])):
        os.write(2, text + b"\n")
