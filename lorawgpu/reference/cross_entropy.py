"""Cross-entropy, SUMMED over target rows (the optimizer divides by the step's count), and the head in chunks.

lse_i  = log(sum_v exp(logits[i, v]))                loss_i  = w_i (lse_i - logits[i, target_i])
dlogits[i, v] = w_i (exp(logits[i, v] - lse_i) - [v == target_i])           w_i = 1 without row weights
"""

import numpy as np


def cross_entropy_forward(logits, targets, weights=1.0):
    """logits [n, V], targets int [n], weights [n] -> loss [n], lse [n]."""
    top = logits.max(-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return weights * (lse - logits[np.arange(len(targets)), targets]), lse


def cross_entropy_backward(logits, targets, lse, weights=1.0):
    """-> dlogits [n, V] of sum(loss)."""
    dlogits = np.exp(logits - lse[:, None])
    dlogits[np.arange(len(targets)), targets] -= 1.0
    return np.reshape(weights, (-1, 1)) * dlogits


def head_loss(x, weight, targets, chunk):
    """The head and its loss, `chunk` rows at a time, without ever holding all logits.

    x [n, C] after the final norm, weight [V, C], targets int [n] -> loss [n], dx [n, C] of sum(loss).
    """
    loss, dx = np.empty(len(x)), np.empty(x.shape)
    for i in range(0, len(x), chunk):
        part = slice(i, i + chunk)
        logits = x[part] @ weight.T
        loss[part], lse = cross_entropy_forward(logits, targets[part])
        dx[part] = cross_entropy_backward(logits, targets[part], lse) @ weight
    return loss, dx
