"""Gradient of one half of a layer: model/sublayer.py in reverse."""

from lorawgpu.backward import attention, mlp, per_layer
from lorawgpu.backward.linear import project_backward
from lorawgpu.model.attention import ATTENTION
from lorawgpu.model.mlp import MLP
from lorawgpu.model.per_layer import PER_LAYER
from lorawgpu.model.sublayer import Mixer, in_blocks
from lorawgpu.ops.rmsnorm import rmsnorm_backward, rmsnorm_forward

MIX_BACKWARD = {ATTENTION.up: attention.mix_backward, MLP.up: mlp.mix_backward, PER_LAYER.up: per_layer.mix_backward}


def half_backward(c, layer, mixer: Mixer, dx, x, s, needs_dx: dict) -> None:
    """dx [rows, C], the gradient of the half's output, becomes that of its input x; adapter gradients +=.

    needs_dx: for each group, whether anything reads the gradient of its input.
    """
    for block, saved, dx_rows, x_rows in in_blocks(c, layer, mixer, s, dx, x):
        dm = _down_backward(block, layer, mixer, dx_rows, saved, needs_dx=needs_dx[mixer.down])
        if needs_dx[mixer.down]:
            _up_backward(block, layer, mixer, dx_rows, dm, x_rows, saved, needs_dx=needs_dx[mixer.up])


def _down_backward(c, layer, mixer: Mixer, dx, s, *, needs_dx: bool):
    """Return the gradient of the mixer's output, given dx [rows, C], the gradient of the half's output.

    Returns None unless `needs_dx`. dx itself remains the gradient of the residual stream.
    """
    role, group = mixer.sub_norm, c.group(layer, mixer.down)
    norm, width = layer.norms.get(role), layer.spec.norm_width(role)
    m, scratch = mixer.mixed(c, layer, s) if norm or group else (None, ())
    rstd, n, normed = s.rstd.get(role), m, ()
    if norm and (group or not rstd):
        if not rstd:
            rstd = c.work.take((c.rows,), label=f"rstd {role}")
            scratch += (rstd,)
        n, normed = _renorm(c, layer, role, m, rstd)
    dm = c.take(_padded_input(layer, mixer.down), "dm") if needs_dx else None
    dy = _out_norm_backward(c, layer, mixer, dx, s)
    project_backward(c, layer, mixer.down, dm, dy, n, normed, s, width=width)
    if dy is not dx:
        c.work.give(dy)
    if needs_dx and norm:
        dn, dm = dm, c.take(dm.shape[1], "dm")
        rmsnorm_backward(c.plan, dm, dn, m, norm, rstd, rows=c.rows, width=width, accumulate=False)
        c.work.give(dn)
    c.work.give(*scratch)
    return dm


def _up_backward(c, layer, mixer: Mixer, dx, dm, x, s, *, needs_dx: bool):
    """dx += the gradient of x, the half's input, through the mixer. Frees dm."""
    role, width, group = mixer.in_norm, layer.spec.norm_width(mixer.in_norm), c.group(layer, mixer.up)
    dy = MIX_BACKWARD[mixer.up](c, layer, dm, s)
    if role not in layer.norms:
        project_backward(c, layer, mixer.up, dx if needs_dx else None, dy, x, (), s, width=width, accumulate=True)
        c.work.give(dy)
        return
    dn = c.take(c.hidden, "dnorm") if needs_dx else None
    n, normed = _renorm(c, layer, role, x, s.rstd[role]) if group else (None, ())
    project_backward(c, layer, mixer.up, dn, dy, n, normed, s, width=width)
    c.work.give(dy)
    if needs_dx:
        norm, rstd = layer.norms[role], s.rstd[role]
        rmsnorm_backward(c.plan, dx, dn, x, norm, rstd, rows=c.rows, width=width, accumulate=True)
        c.work.give(dn)


def _renorm(c, layer, role, x, rstd):
    """Recompute rmsnorm(x) in scratch; returns (tensor, scratch to give back)."""
    y = c.take(x.shape[1], f"norm {role}")
    shape = {"rows": c.rows, "width": layer.spec.norm_width(role)}
    rmsnorm_forward(c.plan, y, rstd, x, layer.norms[role], eps=c.config.rms_norm_eps, **shape)
    return y, (y,)


def _out_norm_backward(c, layer, mixer, dx, s):
    """The gradient of DOWN's output: dx itself, or in scratch if a norm follows DOWN."""
    role = mixer.out_norm
    if role not in layer.norms:
        return dx
    dy = c.take(c.hidden, f"d {role}")
    shape = {"rows": c.rows, "width": layer.spec.hidden}
    rmsnorm_backward(c.plan, dy, dx, s.unnormed[role], layer.norms[role], s.rstd[role], accumulate=False, **shape)
    return dy


def _padded_input(layer, group) -> int:
    return layer.weights[group].columns
