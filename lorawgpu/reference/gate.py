"""The gate of the feed-forward: activation and product.

m  = act(g) * u                                      dg = dm * u * act'(g),   du = dm * act(g)
relu2: act = max(g, 0)^2                             act' = 2 max(g, 0)
silu:  act = g * sig,  sig = 1 / (1 + exp(-g))       act' = sig * (1 + g * (1 - sig))
"""

import numpy as np


def activation(g, act):
    """g [M, I], act "relu2" or "silu" -> act(g), act'(g)."""
    if act == "relu2":
        r = np.maximum(g, 0.0)
        return r * r, 2.0 * r
    if act == "silu":
        sig = 0.5 * (1.0 + np.tanh(0.5 * g))  # never overflows
        return g * sig, sig * (1.0 + g * (1.0 - sig))
    raise ValueError(f"unknown activation {act!r}: relu2 or silu")


def gate_forward(g, u, act):
    """g, u [M, I] -> m [M, I]."""
    return activation(g, act)[0] * u


def gate_backward(dm, g, u, act):
    """dm [M, I] -> dg, du [M, I]."""
    value, slope = activation(g, act)
    return dm * u * slope, dm * value
