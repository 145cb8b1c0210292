"""The flat buffers of an adapter: one buffer, or several that are numbered as one.

Offsets are in elements. A view lies within one buffer; a matrix that is trained whole has several.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.gpu.tensor import Tensor

BUFFER = 128 << 20  # bytes of a buffer, of several: what WebGPU promises for a binding


@dataclass(frozen=True)
class Buffers:
    """Several f32 tensors; number i has the elements from `starts[i]` on."""

    tensors: tuple[Tensor, ...]
    starts: tuple[int, ...]
    label: str

    @property
    def size(self) -> int:
        return self.starts[-1] + self.tensors[-1].size

    @property
    def nbytes(self) -> int:
        return 4 * self.size

    def view(self, start: int, shape: tuple, label: str = "") -> Tensor:
        """As `Tensor.view`. ValueError if it is not within one buffer."""
        index = np.searchsorted(self.starts, start, "right") - 1
        return self.tensors[index].view(start - self.starts[index], shape, label)


Flat = Tensor | Buffers


def take(device, buffers: list[tuple[int, int]], label: str, kind: str) -> Flat:
    """A flat buffer of zeros for these ranges of elements, which follow one another from 0 on."""
    tensors = [device.tensor((stop - start,), label=label, kind=kind) for start, stop in buffers]
    return tensors[0] if len(tensors) == 1 else Buffers(tuple(tensors), tuple(start for start, _ in buffers), label)


def parts(flat: Flat) -> list[tuple[int, Tensor]]:
    """Each buffer and its first element."""
    return list(zip(flat.starts, flat.tensors, strict=True)) if isinstance(flat, Buffers) else [(0, flat)]


def write(device, flat: Flat, values: np.ndarray) -> None:
    for start, tensor in parts(flat):
        device.write(tensor, values[start : start + tensor.size])


def read(device, flat: Flat) -> np.ndarray:
    """All elements, float32. Waits for the GPU."""
    found = [device.read(tensor) for _, tensor in parts(flat)]
    return found[0] if len(found) == 1 else np.concatenate(found)
