"""Soft cap of logits.

y = cap * tanh(z / cap)                              dz = dy * (1 - (y / cap)^2)
"""

import numpy as np


def softcap_forward(z, cap):
    """z [n, V] -> y [n, V]."""
    return cap * np.tanh(z / cap)


def softcap_backward(dy, y, cap):
    """dy [n, V], saved y [n, V] -> dz [n, V]."""
    return dy * (1.0 - (y / cap) ** 2)
