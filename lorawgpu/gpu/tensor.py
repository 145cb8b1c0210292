"""A typed, shaped view of a GPU buffer."""

from dataclasses import dataclass
from math import prod

import numpy as np

# Storage dtypes. Packed formats are plain u32 here; the shader that reads them knows the layout.
DTYPES = {"f32": np.float32, "u32": np.uint32, "i32": np.int32, "f16": np.float16, "bf16": np.uint16}
ALIGN = 256  # bytes; WebGPU's alignment of storage offsets
PAD = 16  # elements; rows are padded with zeros to a multiple of this


def padded(width: int, multiple: int = PAD) -> int:
    """`width` rounded up to `multiple`."""
    return -(-width // multiple) * multiple


@dataclass(frozen=True)
class Tensor:
    """A tensor of `shape` and `dtype` in `buffer`, from byte `offset` (a multiple of 256) on.

    The last axis includes padding: an activation of C columns has shape [M, padded(C)].
    """

    buffer: object
    shape: tuple
    dtype: str = "f32"
    offset: int = 0
    label: str = ""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, rounded up to a multiple of 4 as storage bindings require."""
        return padded(self.size * np.dtype(DTYPES[self.dtype]).itemsize, 4)

    def view(self, start: int, shape: tuple, label: str = "") -> "Tensor":
        """A view of `shape` from element `start` on. ValueError if it is unaligned or out of range."""
        offset = start * np.dtype(DTYPES[self.dtype]).itemsize
        if offset % ALIGN or start + prod(shape) > self.size:
            raise ValueError(f"{self.label}: view of {shape} at element {start} is unaligned or outside {self.shape}")
        return Tensor(self.buffer, shape, self.dtype, self.offset + offset, label or self.label)

    def rows(self, start: int, stop: int) -> "Tensor":
        """Rows [start, stop) of the first axis."""
        return self.view(start * prod(self.shape[1:]), (stop - start, *self.shape[1:]))
