"""RMSNorm over the last axis. The weight is frozen, so there is no dweight.

rstd = 1 / sqrt(mean(x^2) + eps)                     y  = x * rstd * weight
g    = dy * weight                                   dx = rstd * (g - x * rstd^2 * mean(g * x))
out  = (residual + y) * s                            dresidual = s * dout,  dy = s * dout
"""

import numpy as np


def rmsnorm_forward(x, weight, eps):
    """x [M, C], weight [C] -> y [M, C], rstd [M]."""
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + eps)
    return x * rstd[:, None] * weight, rstd


def rmsnorm_backward(dy, x, weight, rstd):
    """dy [M, C], saved x [M, C] and rstd [M] -> dx [M, C]."""
    g, r = dy * weight, rstd[:, None]
    return r * (g - x * r * r * (g * x).mean(-1, keepdims=True))


def rmsnorm_add_forward(residual, x, weight, eps, out_scale=1.0):
    """residual, x [M, C], weight [C] -> out [M, C], rstd [M]."""
    y, rstd = rmsnorm_forward(x, weight, eps)
    return (residual + y) * out_scale, rstd


def rmsnorm_add_backward(dout, x, weight, rstd, out_scale=1.0):
    """dout [M, C], saved x [M, C] and rstd [M] -> dresidual [M, C], dx [M, C]."""
    dy = dout * out_scale
    return dy, rmsnorm_backward(dy, x, weight, rstd)
