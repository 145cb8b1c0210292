"""LoRA's adapter path, which reads the unquantized input and is added to the base output.

    d(x) = x * mask / (1 - p)                            u  = d(x) A^T,        y  = scale * u B^T
    v    = dy B                                          dB = scale * dy^T u,  dA = scale * v^T d(x)
                                                         dx = scale * (v A) * mask / (1 - p)
scale = alpha / r, or alpha / sqrt(r) with rsLoRA. mask: dropout.py; None without dropout.
"""


def dropped(x, mask, p):
    """x [M, in], mask bool [M, in] or None -> x * mask / (1 - p)."""
    return x if mask is None else x * mask / (1.0 - p)


def lora_forward(x, A, B, scale, mask=None, p=0.0):
    """x [M, in], A [r, in], B [out, r] -> y [M, out] (to add to the base output), u [M, r] (saved)."""
    u = dropped(x, mask, p) @ A.T
    return scale * (u @ B.T), u


def lora_backward(dy, x, u, A, B, scale, mask=None, p=0.0):
    """dy [M, out], saved x [M, in] and u [M, r] -> dx [M, in] (to add to the base's), dA [r, in], dB [out, r]."""
    v = dy @ B
    dA = scale * (v.T @ dropped(x, mask, p))
    dB = scale * (dy.T @ u)
    return dropped(scale * (v @ A), mask, p), dA, dB
