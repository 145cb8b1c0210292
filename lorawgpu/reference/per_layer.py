"""A layer's input from the tokens themselves (Gemma 4). Nothing in it is trained.

y = (rmsnorm(scale * proj; eps) * weight + sqrt(P) * row) / sqrt(2)
"""

import numpy as np

from lorawgpu.reference.rmsnorm import rmsnorm_forward


def per_layer_forward(proj, table_rows, weight, scale, eps):
    """proj, table_rows [M, P], weight [P] -> y [M, P]."""
    normed = rmsnorm_forward(scale * proj, weight, eps)[0]
    return (normed + np.sqrt(len(weight)) * table_rows) / np.sqrt(2.0)
