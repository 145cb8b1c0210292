"""Rotary position embedding with Hugging Face's half-split pairs, and what else happens to q, k and v before attention.

    angle = position * inv_freq                          inv_freq_i = theta^(-2i/rot), before any scaling
    y_lo  = x_lo cos - x_hi sin                          y_hi = x_hi cos + x_lo sin
of the pairs (i, i + rot/2) of a head; dimensions from `rot` on pass. The backward is the inverse rotation: -sin.
Tables are float64.
"""

import numpy as np

from lorawgpu.reference.qk_norm import qk_norm_backward, qk_norm_forward


def rope_inv_freq(theta, rot):
    """-> the unscaled frequencies, float64 [rot/2]."""
    return theta ** (-np.arange(0, rot, 2, dtype=np.float64) / rot)


def rope_tables(position, inv_freq):
    """position int [M], inv_freq float64 [rot/2] -> cos, sin float64 [M, rot/2]."""
    angle = np.asarray(position, np.float64)[:, None] * inv_freq
    return np.cos(angle), np.sin(angle)


def rope_forward(x, cos, sin, head_dim=None):
    """x [M, H*HD], any number of heads H; cos, sin [M, rot/2] -> y [M, H*HD]. head_dim: rot unless given."""
    half = cos.shape[1]
    heads = x.reshape(len(x), -1, head_dim or 2 * half)
    lo, hi, rest = np.split(heads, [half, 2 * half], axis=-1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([lo * c - hi * s, hi * c + lo * s, rest], axis=-1).reshape(x.shape)


def rope_backward(dy, cos, sin, head_dim=None):
    """dy [M, H*HD] -> dx [M, H*HD]."""
    return rope_forward(dy, cos, -sin, head_dim)


def heads_forward(x, head_dim, *, bias=0.0, weight=None, eps=0.0, tables=None, scale=1.0):
    """One of q, k and v: x [M, H*HD] -> y = scale * rope(norm(x + bias)) [M, H*HD].

    bias [H*HD]. weight: [HD] for a norm of each head, [H*HD] for a norm of the whole row, None for no norm. tables: cos
    and sin, or None for no rotation.
    """
    y = x + bias
    if weight is not None:
        y, _ = qk_norm_forward(y, weight, eps)
    if tables is not None:
        y = rope_forward(y, *tables, head_dim)
    return scale * y


def heads_backward(dy, x, head_dim, *, bias=0.0, weight=None, eps=0.0, tables=None, scale=1.0):
    """dy, and the forward's x [M, H*HD] -> dx [M, H*HD]. The bias is frozen."""
    dx = scale * dy
    if tables is not None:
        dx = rope_backward(dx, *tables, head_dim)
    if weight is not None:
        dx = qk_norm_backward(dx, x + bias, weight, qk_norm_forward(x + bias, weight, eps)[1])
    return dx
