"""One optimizer step over several processes: each sums and updates its shard of the adapter.

The flat buffers are cut into pieces, one or more layers each, and every rank owns a part of each piece; all its parts
together are its shard. Gradients leave piece by piece, while the backward of the layers below still runs; the owner of
a part adds the parts of all ranks in rank order, on the host. So the sums do not depend on the MPI library. AdamW
differs between drivers in the last bit; therefore each part is updated once, by its owner, and the new parameters are
sent to all. A rank holds the moments of its shard only.
"""

from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise

import numpy as np

from lorawgpu.engine.exchange import Exchange
from lorawgpu.gpu import Device, Tensor
from lorawgpu.gpu.staging import StagingRing
from lorawgpu.gpu.tensor import ALIGN
from lorawgpu.lora.flat import BUFFER, Flat
from lorawgpu.lora.layout import BELOW, AdapterLayout
from lorawgpu.ops.cross_entropy import fixed_point, fixed_point_words

ELEMENTS = ALIGN // 4  # parts begin at multiples of this
PIECE_BYTES = 4 << 20  # a piece has at least this, if there is so much: enough to hide its latency
DEPTH = 8  # pieces in flight between GPU and host
QUEUED = 2  # micro-batches that wait on the device while the host prepares the next


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flat buffers. Their gradient is complete after the backward of `layer`."""

    start: int
    stop: int
    layer: int

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """The elements that `rank` of `size` owns; none at the end of a small piece."""
        width = -(-(self.stop - self.start) // (size * ELEMENTS)) * ELEMENTS
        return tuple(min(self.stop, self.start + width * i) for i in (rank, rank + 1))


def pieces_of(layout: AdapterLayout, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The pieces of the flat buffers in the order in which the backward completes them, from the last layer down."""
    starts, pieces, stop = layout.starts, [], layout.size
    for layer, start in reversed(starts.items()):
        if 4 * (stop - start) >= piece_bytes or layer == min(starts):
            count = max(1, 4 * (stop - start) // (2 * piece_bytes))  # one large layer is several pieces
            width = -(-(stop - start) // (count * ELEMENTS)) * ELEMENTS
            ends = range(stop, start, -width)
            pieces += [Piece(max(start, end - width), end, layer) for end in ends]
            stop = start
    borders = [start for start, _ in layout.buffers]
    return [part for piece in pieces for part in _within_buffers(piece, borders)]


def _within_buffers(piece: Piece, borders: list[int]) -> list[Piece]:
    """A piece cut where a buffer begins, the last part first."""
    ends = [piece.start, *(at for at in borders if piece.start < at < piece.stop), piece.stop]
    return [Piece(a, b, piece.layer) for a, b in reversed(list(pairwise(ends)))]


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks: of squares of the gradient, and the loss words. `record`: lowest id of a bad record."""

    squares: float
    bad: bool
    record: int
    totals: tuple[int, ...]


class Shards:
    """The pieces of one adapter, and their way from rank to rank."""

    def __init__(self, device: Device, layout: AdapterLayout, exchange: Exchange, piece_bytes: int = PIECE_BYTES):
        self.device, self.exchange = device, exchange
        self.pieces = pieces_of(layout, piece_bytes)
        self.parts = [[p.part(rank, exchange.size) for rank in range(exchange.size)] for p in self.pieces]
        self.layers = list(dict.fromkeys(p.layer for p in self.pieces))  # after whose backward a piece is complete
        self.own = [parts[exchange.rank] for parts in self.parts]
        self.offsets = np.cumsum([0, *(b - a for a, b in self.own)]).tolist()  # of own parts in the shard
        self.size = self.offsets[-1]
        self.buffers = [(0, self.size)]
        if len(layout.buffers) > 1:  # a buffer holds whole parts
            at = [0]
            at += [a for a, b in pairwise(self.offsets) if 4 * (b - at[-1]) > BUFFER and a > at[-1]]
            self.buffers = list(pairwise([*at, self.size]))
        longest = max(p.stop - p.start for p in self.pieces)
        self._ring = StagingRing(device, max(4 * longest, 256), min(DEPTH, len(self.pieces)), "exchange")
        self._coming: list[int] = []  # pieces whose parameters have not arrived, in the order of the forward
        self._start()
        self._queue = StagingRing(device, 256, QUEUED, "queue")

    def _start(self) -> None:
        """Nothing of the next step has left yet."""
        self._leaving, self._sums, self._written, self._squares = [], [], 0, 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends in a step, and receives: gradients and parameters."""
        return 8 * self.pieces[0].stop * (self.exchange.size - 1) // self.exchange.size

    def views(self, shard: Flat) -> list[Tensor]:
        """The own parts of a tensor of the shard's size."""
        return [shard.view(at, (b - a,)) for at, (a, b) in zip(self.offsets, self.own, strict=False) if b > a]

    def own_views(self, flat: Flat) -> list[Tensor]:
        """The own parts of a flat buffer."""
        return [flat.view(a, (b - a,), flat.label) for a, b in self.own if b > a]

    # Gradients

    def pace(self, state: Tensor) -> None:
        """Wait until all but the last few micro-batches are done, so that the host notices a device that hangs."""
        if self._queue.full:
            self._queue.pop()
        self.exchange.alive()
        self._queue.push(state)

    def leave(self, grads: Flat, layer: int) -> None:
        """Queue the pieces that are complete after the backward of `layer` was submitted. Does not wait, if it can."""
        while len(self._leaving) < len(self.pieces) and self.pieces[len(self._leaving)].layer >= layer:
            if self._ring.full:
                self._send(grads)
            piece = self.pieces[len(self._leaving)]
            self._ring.push(grads.view(piece.start, (piece.stop - piece.start,)))
            self._leaving.append(piece)
            while self._ring.ready():
                self._send(grads)

    def _send(self, grads: Flat) -> None:
        """Hand the oldest piece that left to the exchange, and write back what it has summed by now."""
        number = len(self._sums)
        (words,) = self._ring.pop()
        self.exchange.alive()
        self._sums.append(self.exchange.later(partial(self._sum, number, words.view(np.float32))))
        while self._written < len(self._sums) and self._sums[self._written].done():
            self._write_sum(grads)

    def _write_sum(self, grads: Flat) -> None:
        """Write the oldest sum back; waits for it."""
        total, squares = self._sums[self._written].result()
        a, b = self.own[self._written]
        if b > a:
            self.device.write(grads.view(a, (b - a,)), total)
        self._written += 1
        self._squares += squares

    def _sum(self, number: int, grads: np.ndarray) -> tuple[np.ndarray, float]:
        """The own part of a piece summed over all ranks in rank order, and the sum of its squares."""
        (a, b), start = self.own[number], self.pieces[number].start
        received = list(np.empty((self.exchange.size, b - a), np.float32))
        self.exchange.swap([grads[i - start : j - start] for i, j in self.parts[number]], received)
        total = reduce(partial(np.add, out=received[0]), received)
        return total, float(np.square(total, dtype=np.float64).sum())

    def sum_step(self, grads: Flat, state: Tensor, totals: tuple[Tensor, ...]) -> StepTotals:
        """Replace the own parts of `grads`, the bad flag and the totals by the sums over all ranks."""
        self.leave(grads, BELOW)
        while len(self._queue):
            self._queue.pop()
            self.exchange.alive()
        while len(self._ring):
            self._send(grads)
        while self._written < len(self.pieces):
            self._write_sum(grads)
        squares = self._squares
        self._start()
        bad, record = self.device.read(state)[:2].tolist()
        words = [fixed_point(self.device.read(total)) for total in totals]
        ranks = self.exchange.gather([squares, bad, record, words])
        squares, bads, records, words = zip(*ranks, strict=True)
        sums = tuple(map(sum, zip(*words, strict=True)))
        for tensor, value in zip(totals, sums, strict=True):
            self.device.write(tensor, fixed_point_words(value))
        return StepTotals(sum(squares), any(bads), min(records), sums)

    # Parameters and moments

    def spread(self, params: Flat) -> None:
        """Begin to send the own parts of `params` to all ranks, from the first layer up; `arrive` ends it."""
        self._coming = list(reversed(range(len(self.pieces))))
        self._unread, self._reading, self._swaps = list(self._coming), [], []
        self._read_more(params)

    def _read_more(self, params: Flat) -> None:
        """Queue copies of own parts to the host while there is room."""
        while self._unread and not self._ring.full:
            a, b = self.own[self._unread[0]]
            if b > a:
                self._ring.push(params.view(a, (b - a,)))
            self._reading.append(self._unread.pop(0))

    def _hand_on(self, params: Flat) -> None:
        """Hand the oldest own part that was read to the exchange."""
        number = self._reading.pop(0)
        a, b = self.own[number]
        part = self._ring.pop()[0].view(np.float32) if b > a else np.empty(0, np.float32)
        self._swaps.append(self.exchange.later(partial(self._all_parts, number, part)))
        self._read_more(params)

    def coming(self, layer: int) -> bool:
        """Whether parameters of `layer`, or of a layer below it, have not arrived."""
        return bool(self._coming) and self.pieces[self._coming[0]].layer <= layer

    def arrive(self, params: Flat, layer: int | None = None) -> None:
        """Write the parts of other ranks to `params`, up to those of `layer`, or all. Waits for them."""
        while self._coming and (layer is None or self.coming(layer)):
            while self._reading and (not self._swaps or self._ring.ready()):
                self._hand_on(params)
            number = self._coming.pop(0)
            for rank, ((a, b), part) in enumerate(zip(self.parts[number], self._swaps.pop(0).result(), strict=True)):
                if rank != self.exchange.rank and b > a:
                    self.device.write(params.view(a, (b - a,)), part)

    def _all_parts(self, number: int, part: np.ndarray) -> list[np.ndarray]:
        received = [np.empty(b - a, np.float32) for a, b in self.parts[number]]
        self.exchange.swap([part] * self.exchange.size, received)
        return received

    def gather(self, shard: np.ndarray) -> np.ndarray:
        """The flat buffer of which this rank holds `shard`. All ranks must call it."""
        flat = np.zeros(self.pieces[0].stop, np.float32)
        for number in range(len(self.pieces)):
            at, end = self.offsets[number : number + 2]
            for (a, b), part in zip(self.parts[number], self._all_parts(number, shard[at:end]), strict=True):
                flat[a:b] = part
        return flat

    def cut(self, flat: np.ndarray) -> np.ndarray:
        """This rank's shard of a flat buffer."""
        return np.concatenate([flat[a:b] for a, b in self.own])
