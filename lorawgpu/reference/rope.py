"""Rotary position embedding with Hugging Face's half-split pairs (i, i + HD/2); tables in float64.

    angle = position * inv_freq                          inv_freq_i = theta^(-2i/HD), before any scaling
    y_lo  = x_lo cos - x_hi sin                          y_hi = x_hi cos + x_lo sin
The backward is the inverse rotation: the same with -sin.
"""

import numpy as np


def rope_inv_freq(theta, head_dim):
    """-> the unscaled frequencies, float64 [HD/2]."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rope_tables(position, inv_freq):
    """position int [M], inv_freq float64 [HD/2] -> cos, sin float64 [M, HD/2]."""
    angle = np.asarray(position, np.float64)[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin):
    """x [M, H*HD], any number of heads H; cos, sin [M, HD/2] -> y [M, H*HD]."""
    half = cos.shape[1]
    lo, hi = np.moveaxis(x.reshape(len(x), -1, 2, half), 2, 0)  # each [M, H, HD/2]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([lo * c - hi * s, hi * c + lo * s], axis=-1).reshape(x.shape)


def rope_backward(dy, cos, sin):
    """dy [M, H*HD] -> dx [M, H*HD]."""
    return rope_forward(dy, cos, -sin)
