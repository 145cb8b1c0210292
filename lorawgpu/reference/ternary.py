"""Ternary BitLinear and the packed 2-bit store of its weights.

    y  = (xq . T^T) * w / s                              T [out, in] in {-1, 0, 1}, one scale w per matrix
    dx = (dy * w) . T                                    (straight through the quantizer)

The product is an integer product, so it is exact in any order. Matrices stacked by rows (q, k, v) keep their own
scales, so w may be a vector [out]. Store: uint8 [r, in], r = ceil(out/4); bits 2i..2i+1 of byte [j, c] hold
T[j + i*r, c] + 1.
"""

import numpy as np


def ternary_pack(T):
    """T [out, in] in {-1, 0, 1} -> uint8 [ceil(out/4), in]. Rows past the end have bits 00."""
    out, n = T.shape
    rows = -(-out // 4)
    codes = np.zeros((4 * rows, n), np.uint8)
    codes[:out] = T + 1
    quarter = codes.reshape(4, rows, n)
    return quarter[0] | quarter[1] << 2 | quarter[2] << 4 | quarter[3] << 6


def ternary_unpack(packed, out):
    """uint8 [ceil(out/4), in] -> T int8 [out, in]."""
    codes = np.concatenate([packed >> 2 * i & 3 for i in range(4)])
    return codes[:out].astype(np.int8) - np.int8(1)


def ternary_from_master(weight):
    """Online quantization of a master weight [out, in], float32 -> T int8 [out, in], w float32.

    w = max(mean|W|, 1e-5) over the whole matrix, T = clamp(round(W / w), -1, 1).
    """
    weight = np.asarray(weight, np.float32)
    w = np.maximum(np.float32(np.abs(weight).mean(dtype=np.float64)), np.float32(1e-5))
    return np.clip(np.rint(weight / w), -1, 1).astype(np.int8), w


def bitlinear_forward(xq, s, T, w):
    """xq int8 [M, in], s [M], T [out, in], w scalar or [out] -> y float64 [M, out]."""
    product = xq.astype(np.float64) @ T.astype(np.float64).T  # integers below 2^53: exact
    return product * w / np.asarray(s, np.float64)[:, None]


def bitlinear_backward(dy, T, w):
    """dy [M, out] -> dx [M, in]."""
    return (dy * w) @ T.astype(np.float64)
