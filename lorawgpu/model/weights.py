"""Frozen weight matrices on the GPU, as they are stored: ternary in 2 bits, dense in bf16, f16 or f32.

A `Weight` is what a linear layer needs to know of one: its stored size, the shader snippet that reads it
(`shaders/common/weight_<store>.wgsl`), its segments, and its row parts. A new store is a snippet and a builder here.
"""

from dataclasses import dataclass

import numpy as np

from ..gpu.tensor import PAD, Tensor, padded
from ..ops.matmul import Segments


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


def _upload_rows(device, blocks: list, rows_per_line: int, dtype: str, label: str) -> tuple:
    """Upload stacked row blocks, cut into parts that fit one binding each. A line is `rows_per_line` matrix rows."""
    line_bytes = blocks[0].shape[1] * blocks[0].itemsize
    step = max(PAD // rows_per_line, device.max_binding // line_bytes // PAD * PAD)
    total = sum(len(b) for b in blocks)
    tensors = [
        device.tensor(
            (min(step, total - start), blocks[0].shape[1]), dtype, f"{label}[{start * rows_per_line}:]", "weights"
        )
        for start in range(0, total, step)
    ]
    at = 0
    for block in blocks:
        for line in range(0, len(block), step):
            piece = block[line : line + step]
            while len(piece):
                part, offset = divmod(at, step)
                count = min(len(piece), step - offset)
                device.queue.write_buffer(
                    tensors[part].buffer, offset * line_bytes, np.ascontiguousarray(piece[:count])
                )
                piece, at = piece[count:], at + count
    starts = [i * step * rows_per_line for i in range(len(tensors))]
    stops = [*starts[1:], total * rows_per_line]
    return tuple(Part(a, b, t) for a, b, t in zip(starts, stops, tensors, strict=True))


def dense_weight(device, matrices: list, label: str) -> Weight:
    """Stack dense matrices (`tensors.Dense`) by rows, kept exactly as stored.

    Matrices of different dtypes are widened to float32, which is exact.
    """
    dtype = matrices[0].dtype if len({m.dtype for m in matrices}) == 1 else "f32"
    blocks = [pad_matrix(m.data if m.dtype == dtype else m.float32()) for m in matrices]
    parts = _upload_rows(device, blocks, 1, dtype, label)
    ends = tuple(np.cumsum([len(b) for b in blocks]).tolist())
    return Weight(ends[-1], blocks[0].shape[1], dtype, Segments(ends, (1.0,) * len(ends)), parts)


def ternary_weight(device, matrices: list, label: str) -> Weight:
    """Stack ternary matrices (`tensors.Ternary`) by rows."""
    blocks = [pack_blocks(codes(m)) for m in matrices]
    parts = _upload_rows(device, blocks, 4, "u32", label)
    ends = tuple((4 * np.cumsum([len(b) for b in blocks])).tolist())
    segments = Segments(ends, tuple(float(m.scale) for m in matrices))
    return Weight(ends[-1], 4 * blocks[0].shape[1], "ternary", segments, parts, int8_input=True)


def codes(matrix) -> np.ndarray:
    """T + 1 of a `tensors.Ternary`, uint8 [out, in], from its packed store."""
    return np.concatenate([matrix.packed >> 2 * i & 3 for i in range(4)])[: matrix.out]
