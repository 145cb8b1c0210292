"""Product with a frozen dense weight [out, in].

y = x W^T                                            dx = dy W
"""


def dense_forward(x, weight):
    """x [M, in] -> y [M, out]."""
    return x @ weight.T


def dense_backward(dy, weight):
    """dy [M, out] -> dx [M, in]."""
    return dy @ weight
