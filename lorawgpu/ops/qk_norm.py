"""RMSNorm of each head of q and k, before RoPE. Equations and layout: shaders/qk_norm.wgsl."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, fold


def qk_norm_forward(plan, y, x, q_weight, k_weight, *, rows, heads, kv_heads, head_dim, k_off, v_off, eps):
    """y [rows, ld] = x with each head of q and k normalized and v copied. Weights: [padded(head_dim)]."""
    params = _params(x, y, q_weight, k_weight, rows, heads, kv_heads, head_dim, k_off, v_off, eps)
    grid = fold(rows * (heads + 2 * kv_heads))
    plan.record("qk_norm", "forward", grid, params=params, x=x, q_weight=q_weight, k_weight=k_weight, y=y)


def qk_norm_backward(plan, dy, x, q_weight, k_weight, *, rows, heads, kv_heads, head_dim, k_off, v_off, eps):
    """Replace the q and k columns of dy [rows, ld] by the gradient of x, in place. x: the forward's input."""
    params = _params(x, dy, q_weight, k_weight, rows, heads, kv_heads, head_dim, k_off, v_off, eps)
    grid = fold(rows * (heads + kv_heads))
    plan.record("qk_norm", "backward", grid, params=params, x=x, q_weight=q_weight, k_weight=k_weight, dy=dy)


def _params(x, y, q_weight, k_weight, rows, heads, kv_heads, head_dim, k_off, v_off, eps) -> dict:
    ld = x.shape[1]
    expect("x", x, (rows, ld))
    expect("y", y, (rows, ld))
    for name, weight in {"q_weight": q_weight, "k_weight": k_weight}.items():
        expect(name, weight, (padded(head_dim),))
    if not heads * head_dim <= k_off <= k_off + kv_heads * head_dim <= v_off <= ld - kv_heads * head_dim:
        raise ValueError(f"qk_norm: {ld} columns do not hold q, k from {k_off} and v from {v_off} one after another")
    return {
        "rows": rows,
        "ld": ld,
        "k_off": k_off,
        "v_off": v_off,
        "HD": head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "eps": eps,
    }
