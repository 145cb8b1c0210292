"""RMSNorm of each head: x [M, H*HD] as [M*H, HD], one weight [HD] for all heads."""

from lorawgpu.reference.rmsnorm import rmsnorm_backward, rmsnorm_forward


def qk_norm_forward(x, weight, eps):
    """-> y [M, H*HD], rstd [M*H]."""
    y, rstd = rmsnorm_forward(x.reshape(-1, len(weight)), weight, eps)
    return y.reshape(x.shape), rstd


def qk_norm_backward(dy, x, weight, rstd):
    """dy, saved x [M, H*HD] and rstd [M*H] -> dx [M, H*HD]."""
    shape = (-1, len(weight))
    return rmsnorm_backward(dy.reshape(shape), x.reshape(shape), weight, rstd).reshape(x.shape)
