"""Quantizing dense matrices to blocks, as they are uploaded (`load_in_8bit`, `load_in_4bit`)."""

import numpy as np

from lorawgpu.ops.stores import Store
from lorawgpu.weights.blocks import Planes, code_bytes, codes, joined, scale, words_of_rows

# The levels of NF4: quantiles of a normal distribution, as bitsandbytes and QLoRA (arXiv:2305.14314, appendix E) have
# them. common/nf4.wgsl has the same values.
NF4_LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
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


def nf4_planes(q: np.ndarray, largest: np.ndarray) -> Planes:
    """Codes [rows, blocks, 64] and float32 scales [rows, blocks, 1]."""
    return [codes(q, 4), words_of_rows(largest.view("<u4"))]


def _reciprocal(d: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _half(d: np.ndarray) -> np.ndarray:
    return scale(d.astype("<f2").view(np.uint8), 0)


QUANTIZERS = {"q8_0": q8_0, "q4_0": q4_0, "nf4": nf4}
