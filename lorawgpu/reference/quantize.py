"""BitNet's per-token int8 quantizer, always in float32.

    s  = 127 / max(max|x|, 1e-5)                         xq = clamp(round_half_even(x * s), -128, 127)
    straight through: x_hat = x + stop(xq / s - x)       dx = dx_hat

Rounding is a step function: central differences see its zero slope, not the straight-through slope. So gradients are
checked on the surrogate `x + residual`, with the residual recorded once, at the point of the check, and then held.
"""

import numpy as np


def quantize_forward(x):
    """x [M, C] -> xq int8 [M, C], s float32 [M]. Each operation corresponds to one float32 operation of the kernel."""
    x = np.asarray(x, np.float32)
    s = np.float32(127) / np.maximum(np.abs(x).max(-1), np.float32(1e-5))
    return np.clip(np.rint(x * s[:, None]), -128, 127).astype(np.int8), s


def dequantize(xq, s):
    """xq int8 [M, C], s [M] -> x_hat = xq / s, float64 [M, C]."""
    return xq / s.astype(np.float64)[:, None]


def quantize_residual(x):
    """x [M, C] -> stop(xq / s - x), float64 [M, C], to be held while x changes."""
    return dequantize(*quantize_forward(x)) - x


def quantize_backward(dx_hat):
    """The straight-through gradient: dx_hat [M, C] -> dx [M, C], unchanged."""
    return dx_hat
