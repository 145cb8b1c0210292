"""Matrices of codes with a scale and a bias for each group of columns, as MLX, GPTQ, AWQ and compressed-tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GROUPS = (32, 64, 128)


class Rows(NamedTuple):
    """Rows of a matrix: codes uint8 [rows, in]; scales and biases float32 [rows, groups]."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray

    def float32(self) -> np.ndarray:
        """code * scale + bias; product and sum each round to float32."""
        grouped = self.codes.reshape(*self.scales.shape, -1).astype(np.float32)
        return (grouped * self.scales[..., None] + self.biases[..., None]).reshape(self.codes.shape)

    def in_groups(self, group: int) -> "Rows":
        """The same rows with a scale for each `group` columns; now each may be for several such groups."""
        times = self.codes.shape[1] // group // self.scales.shape[1]
        return self if times == 1 else Rows(self.codes, *(np.repeat(part, times, axis=1) for part in self[1:]))


@dataclass(frozen=True)
class Affine:
    """A matrix of `shape` [out, in]; read(first, last): those of its rows. `where`: for messages."""

    shape: tuple[int, int]
    bits: int
    group: int
    read: Callable[[int, int], Rows]
    where: str

    @property
    def store(self) -> str:
        """The name of its store (ops/stores.py)."""
        return f"affine{self.bits}_{self.group}"

    def float32(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return self.read(0, self.shape[0]).float32()


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits, uint8, from 32-bit words, the lowest bits first: [.., n] -> [.., n * 32 / bits]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    return np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1).reshape(*raw.shape[:-1], -1)
