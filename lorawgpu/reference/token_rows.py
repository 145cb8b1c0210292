"""Trained rows of a table, and the gradient of a table that is looked up.

forward: x[t] = rows[row] * scale if ids[t] has a row         columns: logits[:, ids[k]] = small[:, k]
backward: drows[row] += scale * sum of dx[t] over the t of its id
"""

import numpy as np


def rows_forward(x, ids, row_of, rows, scale=1.0):
    """x [M, C], ids int [M], row_of int [V] (-1: none), rows [n, C] -> x [M, C]."""
    own = row_of[ids] >= 0
    return np.where(own[:, None], rows[row_of[ids]] * scale, x)


def rows_backward(dx, ids, row_of, count, scale=1.0):
    """dx [M, C] -> drows [count, C]; the gradient of x itself is that of the other tokens."""
    drows = np.zeros((count, dx.shape[1]))
    own = row_of[ids] >= 0
    np.add.at(drows, row_of[ids[own]], scale * dx[own])
    return drows


def columns_forward(logits, ids, small):
    """logits [M, V], ids int [n], small [M, n] -> logits."""
    out = logits.copy()
    out[:, ids] = small
    return out


def columns_backward(dlogits, ids):
    """dlogits [M, V] -> the gradients of logits and small."""
    rest = dlogits.copy()
    rest[:, ids] = 0
    return rest, dlogits[:, ids]
