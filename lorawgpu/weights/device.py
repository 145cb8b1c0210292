"""Upload frozen weight matrices without changing their values (stores: ops/stores.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from itertools import accumulate, groupby

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.dtypes import widen
from lorawgpu.gpu.tensor import DTYPES, PAD, Tensor, padded
from lorawgpu.ops.matmul import Segments
from lorawgpu.ops.stores import NF4, STORES, TERNARY, Store
from lorawgpu.ops.weight import Part, Weight
from lorawgpu.util.threads import InOrder
from lorawgpu.weights.affine import Affine
from lorawgpu.weights.blocks import affine_records, block_bytes, records
from lorawgpu.weights.nf4 import Nf4
from lorawgpu.weights.quantizers import nf4_records, quantized
from lorawgpu.weights.tensors import Blocks, Dense, Quantizable, Ternary

CHUNK_WEIGHTS = 1 << 20  # weights packed and uploaded at a time: few enough for a processor's cache
MAX_STAGED = 64 << 20  # bytes: the driver's library keeps what is written in host memory until the next submit


NOT_FINITE = "has values that are not finite (NaN or infinity), so the model computes nothing; download it again"


def is_finite(values: np.ndarray, dtype: str) -> bool:
    """Whether no value is NaN or infinite, bf16 as uint16."""
    return not ((values & 0x7F80) == 0x7F80).any() if dtype == "bf16" else bool(np.isfinite(values).all())


@dataclass(frozen=True)
class Lines:
    """A matrix on the host in the device's layout, packed as it is read. `rows` and `columns` are padded to 16."""

    store: Store
    rows: int
    columns: int
    read: Callable[[int, int], np.ndarray]  # (first, last) line -> [lines, elements]
    scale: float = 1.0


@singledispatch
def lines_of(matrix) -> Lines:
    """Prepare a matrix of weights/tensors.py for the device. A new kind of matrix registers its own function."""
    raise TypeError(f"{type(matrix).__name__} is not a matrix that a device can hold")


@lines_of.register
def _(matrix: Dense) -> Lines:
    rows, columns = map(padded, matrix.data.shape)

    def read(first, last):
        values = matrix.data[first:last]
        if matrix.where and not is_finite(values, matrix.dtype):
            raise UserError(f"{matrix.where}: {NOT_FINITE}")
        return pad_to(values, last - first, columns)

    return Lines(STORES[matrix.dtype], rows, columns, read)


@lines_of.register
def _(matrix: Ternary) -> Lines:
    words = pack_blocks(codes(matrix))
    return Lines(TERNARY, 4 * len(words), 4 * words.shape[1], lambda i, j: words[i:j], float(matrix.scale))


@lines_of.register
def _(matrix: Blocks) -> Lines:
    store = STORES[matrix.store]
    columns = matrix.data.shape[1] // block_bytes(store) * store.block

    def read(first, last):
        try:
            words = records(matrix.data[4 * first : 4 * last], store)
        except ValueError:
            raise UserError(
                f"{matrix.where}: has scales that are not finite; the file is damaged, download it again."
            ) from None
        return pad_to(words, last - first, words.shape[1])

    return Lines(store, padded(len(matrix.data)), columns, read)


@lines_of.register
def _(matrix: Quantizable) -> Lines:
    store, (rows, columns) = STORES[matrix.store], matrix.dense.data.shape

    def read(first, last):
        values = widen(matrix.dense.data[4 * first : 4 * last], matrix.dense.dtype)
        try:
            return quantized(pad_to(values, 4 * (last - first), columns), store)
        except ValueError:
            raise UserError(f"{matrix.where}: has values that are not finite, or too large; it is damaged.") from None

    return Lines(store, padded(rows), columns, read)


@lines_of.register
def _(matrix: Nf4) -> Lines:
    rows, columns = len(matrix.packed), 2 * matrix.packed.shape[1]

    def read(first, last):
        part = slice(4 * first, 4 * last)
        try:
            words = nf4_records(Nf4(matrix.packed[part], matrix.scales[part], matrix.where), NF4)
        except ValueError:
            raise UserError(f"{matrix.where}: has scales that are not finite; the file is damaged.") from None
        return pad_to(words, last - first, words.shape[1])

    return Lines(NF4, padded(rows), columns, read)


class Uploads:
    """Packs matrices in threads and writes them into GPU memory. Leaving the context waits until all are there.

    advance(n): called when n more weights, padding included, are written.
    """

    def __init__(self, device, advance: Callable[[int], None] = lambda count: None) -> None:
        self.device, self._advance, self._calls, self._staged = device, advance, InOrder(), 0

    def __enter__(self) -> "Uploads":
        return self

    def add(self, matrix: Lines, start: int, part: Part) -> None:
        """The rows of `matrix`, which begin at row `start` of the weight, that lie in `part`."""
        per_line = part.store.rows
        first, last = max(start, part.start), min(start + matrix.rows, part.stop)
        step = max(1, CHUNK_WEIGHTS // (matrix.columns * per_line)) * per_line
        for row in range(first, last, step):
            stop = min(row + step, last)
            at = (row - part.start) // per_line * part.tensor.shape[1]
            read = partial(matrix.read, (row - start) // per_line, (stop - start) // per_line)
            self._calls.put(read, partial(self._write, part.tensor, at, (stop - row) * matrix.columns))

    def _write(self, tensor: Tensor, at: int, count: int, lines: np.ndarray) -> None:
        self.device.write_at(tensor, at, lines)
        self._advance(count)
        self._staged += lines.nbytes
        if self._staged > MAX_STAGED:
            self.device.wait()
            self._staged = 0

    def __exit__(self, error, *rest) -> None:
        self._calls.__exit__(error, *rest)
        if error is None:
            self.device.wait()


@lines_of.register
def _(matrix: Affine) -> Lines:
    store, (rows, columns) = STORES[matrix.store], matrix.shape

    def read(first, last):
        try:
            words = affine_records(matrix.read(4 * first, min(4 * last, rows)), store)
        except ValueError:
            raise UserError(f"{matrix.where}: has scales that are not finite; the file is damaged.") from None
        return pad_to(words, last - first, words.shape[1])

    return Lines(store, padded(rows), columns, read)


def stack_weight(uploads: Uploads, matrices: list, label: str) -> Weight:
    """Matrices stacked by rows, each in its own store, which are uploaded when `uploads` ends."""
    stacked = [lines_of(matrix) for matrix in matrices]
    weight = empty_weight(uploads.device, [(m.store, m.rows, m.scale) for m in stacked], stacked[0].columns, label)
    for matrix, end in zip(stacked, weight.segments.ends, strict=True):
        for part in weight.parts:
            uploads.add(matrix, end - matrix.rows, part)
    return weight


def upload_weight(device, matrices: list, label: str) -> Weight:
    """The same, uploaded now."""
    with Uploads(device) as uploads:
        return stack_weight(uploads, matrices, label)


def empty_weight(device, stacked: list, columns: int, label: str) -> Weight:
    """A zeroed weight for matrices (store, padded rows, scale) of `columns` (padded) columns, stacked by rows.

    It is cut where the store changes and where a binding is full. Where it is cut affects the bits of dx = dy W, which
    adds up the parts in order.
    """
    ends = tuple(accumulate(rows for _, rows, _ in stacked))
    parts, start = [], 0
    for store, run in groupby(zip(stacked, ends, strict=True), key=lambda pair: pair[0][0]):
        *_, (_, stop) = run
        parts += _cut(device, store, start, stop, columns, label)
        start = stop
    return Weight(ends[-1], columns, Segments(ends, tuple(scale for *_, scale in stacked)), tuple(parts))


def _cut(device, store: Store, start: int, stop: int, columns: int, label: str) -> list[Part]:
    """Zeroed parts for rows [start, stop), each within one binding and cut at padded lines."""
    _, width = store.shape(stop - start, columns)
    line_bytes = width * np.dtype(DTYPES[store.dtype]).itemsize
    step = store.rows * max(PAD // store.rows, device.max_binding // line_bytes // PAD * PAD)
    parts = []
    for first in range(start, stop, step):
        last = min(first + step, stop)
        shape = store.shape(last - first, columns)
        parts.append(Part(first, last, device.tensor(shape, store.dtype, f"{label}[{first}:]", "weights"), store))
    return parts


def pack_blocks(codes: np.ndarray) -> np.ndarray:
    """Codes T+1 uint8 [N, K] -> uint32 [padded(N)/4, padded(K)/4]; bits 8c+2r of word (i, j) hold codes[4i+r, 4j+c]."""
    n, k = codes.shape
    full = np.ones((padded(n), padded(k)), np.uint8)  # code 1 is T = 0
    full[:n, :k] = codes
    quads = full.reshape(padded(n) // 4, 4, padded(k))
    rows = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return np.ascontiguousarray(rows).view("<u4")


def pad_to(lines: np.ndarray, count: int, width: int) -> np.ndarray:
    """`lines`, zero-padded to [count, width]. Returns the same array if it needs no padding."""
    missing = [(0, count - lines.shape[0]), (0, width - lines.shape[1])]
    return np.pad(lines, missing) if lines.shape != (count, width) else lines


def pad_vector(vector: np.ndarray) -> np.ndarray:
    """`vector`, zero-padded to a multiple of 16."""
    return np.pad(vector, (0, padded(len(vector)) - len(vector)))


def codes(matrix) -> np.ndarray:
    """Codes T + 1 of a `tensors.Ternary`, uint8 [out, in]."""
    return np.concatenate([matrix.packed >> 2 * i & 3 for i in range(4)])[: matrix.out]
