"""The gate of the feed-forward: activation and product.

m  = s * act(g) * u                                  dg = s * dm * u * act'(g),   du = s * dm * act(g)
relu2: act = max(g, 0)^2                             act' = 2 max(g, 0)
silu:  act = g * sig,  sig = 1 / (1 + exp(-g))       act' = sig * (1 + g * (1 - sig))
gelu_tanh: act = g/2 (1 + tanh z)                    act' = (1 + tanh z) / 2 + g/2 (1 - tanh^2 z) z'
    z = sqrt(2/pi) (g + 0.044715 g^3)                z' = sqrt(2/pi) (1 + 3 * 0.044715 g^2)
"""

import numpy as np


def activation(g, act):
    """g [M, I], act "relu2", "silu" or "gelu_tanh" -> act(g), act'(g)."""
    if act == "relu2":
        r = np.maximum(g, 0.0)
        return r * r, 2.0 * r
    if act == "silu":
        sig = 0.5 * (1.0 + np.tanh(0.5 * g))  # never overflows
        return g * sig, sig * (1.0 + g * (1.0 - sig))
    if act == "gelu_tanh":
        root = np.sqrt(2.0 / np.pi)
        t = np.tanh(root * (g + 0.044715 * g**3))
        return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * root * (1.0 + 3 * 0.044715 * g * g)
    raise ValueError(f"unknown activation {act!r}: relu2, silu or gelu_tanh")


def gate_forward(g, u, act, scale=1.0):
    """g, u [M, I] -> m [M, I]."""
    return scale * activation(g, act)[0] * u


def gate_backward(dm, g, u, act, scale=1.0):
    """dm [M, I] -> dg, du [M, I]."""
    value, slope = activation(g, act)
    return scale * dm * u * slope, scale * dm * value
