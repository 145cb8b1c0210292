"""A fused projection with its adapters, and the norm and quantizer in front of it."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.linear import linear_forward
from lorawgpu.ops.lora import lora_down, lora_up
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward
from lorawgpu.ops.rmsnorm import rmsnorm_forward


@dataclass(frozen=True)
class Input:
    """A projection's input: `x` for a float product and for adapters, `xq` and `qscale` for an int8 product."""

    x: Tensor | None
    xq: Tensor | None = None
    qscale: Tensor | None = None
    owned: tuple = ()  # scratch to give back after the projection


def norm_input(c, layer, role, group, x, rstd, name) -> Input:
    """The input of projection `group`: x through the layer's norm `role`, quantized if needed. Writes rstd [rows]."""
    weight, width = layer.norms[role], layer.spec.norm_width(role)
    eps, shape = c.config.rms_norm_eps, {"rows": c.rows, "width": width}
    if not layer.weights[group].int8_input:
        y = c.take(x.shape[1], f"norm {name}")
        rmsnorm_forward(c.plan, y, rstd, x, weight, eps=eps, **shape)
        return Input(y, owned=(y,))
    y = c.take(x.shape[1], f"norm {name}") if c.group(layer, group) else None  # an adapter reads the unquantized rows
    xq, qscale = c.take(x.shape[1] // 4, f"xq {name}", "u32"), c.take(2, f"qscale {name}", "u32")
    record_id = c.non_finite.id(name)
    rmsnorm_quantize_forward(c.plan, y, rstd, xq, qscale, x, weight, c.state, eps=eps, record_id=record_id, **shape)
    return Input(y, xq, qscale, tuple(t for t in (y, xq, qscale) if t))


def plain_input(c, layer, role, group, x, name) -> Input:
    """The input of projection `group` if the layer has no norm `role`: x itself, quantized if needed."""
    if not layer.weights[group].int8_input:
        return Input(x)
    width, record_id = layer.spec.norm_width(role), c.non_finite.id(name)
    xq, qscale = c.take(x.shape[1] // 4, f"xq {name}", "u32"), c.take(2, f"qscale {name}", "u32")
    quantize_forward(c.plan, xq, qscale, x, c.state, rows=c.rows, width=width, record_id=record_id)
    return Input(x, xq, qscale, (xq, qscale))


def project(c, layer, name, y, source: Input, s, *, width, residual=None):
    """y = W(source) + adapters (+ residual) for projection `name` of a layer. Frees `source`.

    Saves s.h[name] [rows, total rank of the group] for the backward.
    """
    weight, group, lora = layer.weights[name], c.group(layer, name), None
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
                    first_row=c.first_row,
                )
            lora = lora_up(group, h, c.adapter.params)
        x = source.xq if weight.int8_input else source.x
        linear_forward(c.plan, y, x, weight, rows=c.rows, qscale=source.qscale, lora=lora, residual=residual)
    c.work.give(*source.owned)
