"""Global gradient norm, clipping, and PyTorch's AdamW. Weight decay applies to every adapter tensor.

norm  = sqrt(sum over all tensors of g^2)            g *= min(1, max_norm / (norm + 1e-6))
p    -= lr * weight_decay * p
m     = beta1 m + (1 - beta1) g                      v  = beta2 v + (1 - beta2) g^2
p    -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
"""

import numpy as np


def grad_norm(grads):
    """A sequence of arrays -> their joint norm, before clipping."""
    return np.sqrt(sum((g * g).sum() for g in grads))


def clip_scale(norm, max_norm):
    """-> the factor for all gradients."""
    return min(1.0, max_norm / (norm + 1e-6))


def adamw_update(p, g, m, v, t, lr, beta1, beta2, eps, weight_decay):
    """Step t = 1, 2, ... of one tensor, with clipped gradient g -> new p, m, v."""
    p = p - lr * weight_decay * p
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    return p - lr / (1.0 - beta1**t) * m / (np.sqrt(v) / np.sqrt(1.0 - beta2**t) + eps), m, v
