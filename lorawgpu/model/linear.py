"""A fused projection with its adapters, and the norm and quantiser in front of it."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.linear import linear_forward
from lorawgpu.ops.lora import lora_down, lora_up
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward
from lorawgpu.ops.rmsnorm import rmsnorm_forward


@dataclass(frozen=True)
class Input:
    """What a projection reads: `x` for a dense weight and for adapters, int8 words and scales for a ternary one."""

    x: Tensor | None
    xq: Tensor | None = None
    qscale: Tensor | None = None
    owned: tuple = ()  # scratch to give back after the projection


def norm_input(c, x, weight, rstd, *, width, quantised, keep, name) -> Input:
    """rmsnorm(x) for a projection; `keep` says whether an adapter needs the unquantised rows too."""
    eps, shape = c.config.rms_norm_eps, {"rows": c.rows, "width": width}
    if not quantised:
        y = c.take(x.shape[1], f"norm {name}")
        rmsnorm_forward(c.plan, y, rstd, x, weight, eps=eps, **shape)
        return Input(y, owned=(y,))
    y = c.take(x.shape[1], f"norm {name}") if keep else None
    xq, qscale = c.take(x.shape[1] // 4, f"xq {name}", "u32"), c.take(2, f"qscale {name}", "u32")
    rmsnorm_quantize_forward(
        c.plan, y, rstd, xq, qscale, x, weight, c.state, eps=eps, record_id=c.watch.id(name), **shape
    )
    return Input(y, xq, qscale, tuple(t for t in (y, xq, qscale) if t))


def plain_input(c, x, *, width, quantised, name) -> Input:
    """x itself for a projection that has no norm before it, quantised where the weight is ternary."""
    if not quantised:
        return Input(x)
    xq, qscale = c.take(x.shape[1] // 4, f"xq {name}", "u32"), c.take(2, f"qscale {name}", "u32")
    quantize_forward(c.plan, xq, qscale, x, c.state, rows=c.rows, width=width, record_id=c.watch.id(name))
    return Input(x, xq, qscale, (xq, qscale))


def project(c, layer, name, y, source: Input, s, *, width, residual=None):
    """y = W(source) + adapters (+ residual) for the projection `name` of a layer; frees `source`.

    s.h[name] [rows, rank of the group's adapters] is saved for the backward.
    """
    weight, group, lora = getattr(layer, name), c.group(layer, name), None
    with c.plan.scope(name):
        if group:
            h = s.h[name]
            with c.plan.scope("lora_down"):
                lora_down(
                    c.plan,
                    c.work,
                    h,
                    source.x,
                    group,
                    c.adapter.params,
                    rows=c.rows,
                    width=width,
                    step=c.step,
                    p=c.dropout,
                )
            lora = lora_up(group, h, c.adapter.params)
        x = source.xq if weight.int8_input else source.x
        linear_forward(c.plan, y, x, weight, rows=c.rows, qscale=source.qscale, lora=lora, residual=residual)
    c.work.give(*source.owned)
