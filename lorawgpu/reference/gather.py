"""Gather target rows from the residual stream, and scatter their gradient back.

y[i] = x[rows[i]]                                    dx[rows[i]] += dy[i], 0 in all other rows
"""

import numpy as np


def gather_forward(x, rows):
    """x [M, C], rows int [n] -> y [n, C]."""
    return x[rows]


def gather_backward(dy, rows, M):
    """dy [n, C], rows int [n] -> dx [M, C]."""
    dx = np.zeros((M, dy.shape[1]))
    np.add.at(dx, rows, dy)
    return dx
