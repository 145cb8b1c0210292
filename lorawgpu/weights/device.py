"""Frozen weight matrices on the GPU, as they are stored: ternary in 2 bits, dense in bf16, f16 or f32.

A `Weight` is what a linear layer needs to know of one: its stored size, the shader snippet that reads it
(`shaders/common/weight_<store>.wgsl`), its segments, and its row parts. A new store is a snippet and a builder here.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu.tensor import DTYPES, PAD, Tensor, padded
from lorawgpu.ops.matmul import Segments


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a weight, in one binding."""

    start: int
    stop: int
    tensor: Tensor


@dataclass(frozen=True)
class Weight:
    """`rows` x `columns` as stored (both padded to 16, the padding worth zero), split by rows into bindings.

    `segments`: where matrices that were stacked by rows end, with each one's scale.
    `int8_input`: its input is quantised per token (BitLinear).
    """

    rows: int
    columns: int
    store: str
    segments: Segments
    parts: tuple
    int8_input: bool = False

    @property
    def stride(self) -> int:
        """The row stride as `matmul` counts it: elements, or 4 x 4 blocks of a ternary store."""
        return self.columns // 4 if self.store == "ternary" else self.columns

    @property
    def nbytes(self) -> int:
        return sum(p.tensor.nbytes for p in self.parts)


def pack_blocks(codes: np.ndarray) -> np.ndarray:
    """Codes T+1 uint8 [N, K] -> uint32 [ceil16(N)/4, ceil16(K)/4]; bits 8c+2r of (i, j) hold codes[4i+r, 4j+c]."""
    n, k = codes.shape
    full = np.ones((padded(n), padded(k)), np.uint8)  # code 1 is T = 0
    full[:n, :k] = codes
    quads = full.reshape(padded(n) // 4, 4, padded(k))
    rows = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return np.ascontiguousarray(rows).view("<u4")


def pad_matrix(matrix: np.ndarray) -> np.ndarray:
    """`matrix` with both axes padded with zeros to multiples of 16; the same array when nothing is missing."""
    missing = [(0, padded(s) - s) for s in matrix.shape]
    return np.pad(matrix, missing) if any(m for _, m in missing) else matrix


def pad_vector(vector: np.ndarray) -> np.ndarray:
    """`vector` padded with zeros to a multiple of 16."""
    return np.pad(vector, (0, padded(len(vector)) - len(vector)))


def empty_parts(device, rows: int, columns: int, store: str, label: str) -> tuple:
    """The parts of a weight, zeroed: `rows` x `columns` (padded) cut by rows, each within one binding.

    A line of the stored array is one row, of a ternary store four. Where parts end is part of the result's bits: a
    transposed product adds them one after another.
    """
    per_line, dtype = (4, "u32") if store == "ternary" else (1, store)
    width = columns // per_line  # of a line in elements: a ternary one is a word for 4 x 4 codes
    line_bytes = width * np.dtype(DTYPES[dtype]).itemsize
    step = per_line * max(PAD // per_line, device.max_binding // line_bytes // PAD * PAD)
    spans = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    return tuple(
        Part(start, stop, device.tensor(((stop - start) // per_line, width), dtype, f"{label}[{start}:]", "weights"))
        for start, stop in spans
    )


def _fill(device, parts: tuple, blocks: list):
    """Write stacked blocks of lines into `parts`, which they fill."""
    step, at = parts[0].tensor.shape[0], 0
    for block in blocks:
        for line in range(0, len(block), step):
            piece = block[line : line + step]
            while len(piece):
                part, offset = divmod(at, step)
                count = min(len(piece), step - offset)
                tensor = parts[part].tensor
                device.write_at(tensor, offset * tensor.shape[1], piece[:count])
                piece, at = piece[count:], at + count


def dense_weight(device, matrices: list, label: str) -> Weight:
    """Stack dense matrices (`tensors.Dense`) by rows, kept exactly as stored.

    Matrices of different dtypes are widened to float32, which is exact.
    """
    dtype = matrices[0].dtype if len({m.dtype for m in matrices}) == 1 else "f32"
    blocks = [pad_matrix(m.data if m.dtype == dtype else m.float32()) for m in matrices]
    ends = tuple(np.cumsum([len(b) for b in blocks]).tolist())
    parts = empty_parts(device, ends[-1], blocks[0].shape[1], dtype, label)
    _fill(device, parts, blocks)
    return Weight(ends[-1], blocks[0].shape[1], dtype, Segments(ends, (1.0,) * len(ends)), parts)


def ternary_weight(device, matrices: list, label: str) -> Weight:
    """Stack ternary matrices (`tensors.Ternary`) by rows."""
    blocks = [pack_blocks(codes(m)) for m in matrices]
    ends = tuple((4 * np.cumsum([len(b) for b in blocks])).tolist())
    parts = empty_parts(device, ends[-1], 4 * blocks[0].shape[1], "ternary", label)
    _fill(device, parts, blocks)
    segments = Segments(ends, tuple(float(m.scale) for m in matrices))
    return Weight(ends[-1], 4 * blocks[0].shape[1], "ternary", segments, parts, int8_input=True)


def codes(matrix) -> np.ndarray:
    """T + 1 of a `tensors.Ternary`, uint8 [out, in], from its packed store."""
    return np.concatenate([matrix.packed >> 2 * i & 3 for i in range(4)])[: matrix.out]
