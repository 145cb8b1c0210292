"""The process that names a rank that died, and each rank's connection to it (mpi/obituary.py)."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

from lorawgpu.mpi import obituary

BACKLOG = 64
PATIENCE = 10.0  # seconds for it to start


class Sentinel:
    """It prints the last thing that this process told it, if this process dies without dismissing it.

    There is one on each machine, which the first of its ranks starts. `node`: the communicator of the machine's ranks.
    Where there are no such sockets (Windows), or no place for one, it says nothing.
    """

    def __init__(self, node):
        self._socket = None
        if not hasattr(socket, "AF_UNIX"):
            return
        path = self._start(node.size) if node.rank == 0 else None
        path = node.bcast(path)
        with contextlib.suppress(OSError):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(PATIENCE)
            connection.connect(path)
            connection.recv(1)  # it listens now
            self._socket = connection
        node.Barrier()
        if node.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))

    def _start(self, ranks: int) -> str:
        path = os.path.join(tempfile.mkdtemp(prefix="lorawgpu-"), "ranks")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(BACKLOG)
            number = listener.fileno()
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", obituary.__file__, str(number), str(ranks)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )
        return path

    def tell(self, text: str) -> None:
        """Print `text`, as one line, if this process dies."""
        if self._socket:
            with contextlib.suppress(OSError):  # somebody ended it
                self._socket.sendall(" ".join(text.split()).encode(errors="replace") + b"\n")

    def dismiss(self) -> None:
        """Say nothing if this process ends."""
        self.tell(obituary.BYE.decode())
        self._socket = None
