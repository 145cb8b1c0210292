"""Quantizing dense matrices to blocks, as they are uploaded (`load_in_8bit`, `load_in_4bit`)."""

import numpy as np

from lorawgpu.ops.stores import Store
from lorawgpu.weights.blocks import Planes, code_bytes, codes, joined, scale, words_of_rows
from lorawgpu.weights.nf4 import NF4_LEVELS, Nf4

# Typical rounding errors, in units of the standard deviation of normally distributed weights.
TYPICAL_ERROR = {"q8_0": 0.0054, "q4_0": 0.086, "nf4": 0.092}


def quantized(values: np.ndarray, store: Store) -> np.ndarray:
    """float32 [rows (a multiple of 4), columns] as records of `store`, uint32 [rows / 4, words].

    ValueError if a value is not finite.
    """
    blocks = values.reshape(len(values), -1, store.block)
    with np.errstate(all="ignore"):  # what is not finite shows in the scales
        return joined(QUANTIZERS[store.name](blocks), store)


def q8_0(values: np.ndarray) -> Planes:
    """The largest magnitude of a block becomes 127, as in ggml-quants.c."""
    d = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    q = np.rint(values * _reciprocal(d)).astype(np.int8)
    return [code_bytes(q.view(np.uint8)), _half(d)]


def q4_0(values: np.ndarray) -> Planes:
    """The value of the largest magnitude becomes -8, as in ggml-quants.c."""
    least, most = values.min(axis=-1, keepdims=True), values.max(axis=-1, keepdims=True)
    d = np.where(most > -least, most, least) / np.float32(-8)
    q = np.minimum(values * _reciprocal(d) + np.float32(8.5), np.float32(15)).astype(np.uint8)
    return [codes(q ^ 8, 4), _half(d)]


def nf4(values: np.ndarray) -> Planes:
    """The nearest level after division by the largest magnitude, bit by bit as in bitsandbytes' quantize_4bit."""
    largest = np.abs(values).max(axis=-1, keepdims=True)
    scaled = values * (np.float32(1) / np.maximum(largest, np.float32(1e-38)))
    q = np.zeros(values.shape, np.uint8)
    for border in (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / np.float32(2):
        q += scaled > border
    return nf4_planes(q, largest)


def nf4_records(matrix: Nf4, store: Store) -> np.ndarray:
    """A matrix of any number of rows as records. ValueError if a scale is not finite."""
    rows = [(0, -len(matrix.scales) % 4), (0, 0)]
    q, scales = np.pad(matrix.codes(), rows), np.pad(matrix.scales, rows)
    return joined(nf4_planes(q.reshape(len(q), -1, store.block), scales[..., None]), store)


def nf4_planes(q: np.ndarray, largest: np.ndarray) -> Planes:
    """Codes [rows, blocks, 64] and float32 scales [rows, blocks, 1]."""
    return [codes(q, 4), words_of_rows(largest.view("<u4"))]


def _reciprocal(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _half(d: np.ndarray) -> np.ndarray:
    return scale(d.astype("<f2").view(np.uint8), 0)


QUANTIZERS = {"q8_0": q8_0, "q4_0": q4_0, "nf4": nf4}
