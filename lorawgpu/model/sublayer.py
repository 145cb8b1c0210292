"""One half of a layer, written once for all mixers. The gradient: backward/sublayer.py.

out = x + [out norm]( DOWN( [sub norm]( mixer( UP( [in norm]( x ) ) ) ) ) )
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.model.linear import Input, norm_input, plain_input, project
from lorawgpu.ops.rmsnorm import rmsnorm_forward


@dataclass(frozen=True)
class Mixer:
    """What a half has between its two projections: model/attention.py, model/mlp.py, model/per_layer.py.

    up_buffer(c, layer, s): the tensor that UP writes. keep(c, layer, y, s): records what the backward needs of it.
    mix(c, layer, s): records the mixer. mixed(c, layer, s): the mixer's output in the backward, saved or recomputed.
    The last two return (tensor, scratch to give back). widest(layer): columns of the widest activation of a half that
    may run in blocks of rows.
    """

    up: str  # `up` and `down` are groups (spec.GROUPS)
    down: str
    in_norm: str  # norms are roles (spec.Norms)
    sub_norm: str
    out_norm: str
    input: str  # `input` and `middle` name the inputs of UP and DOWN in reports of non-finite values
    middle: str
    up_buffer: Callable[..., Tensor]
    keep: Callable[..., None]
    mix: Callable[..., tuple[Tensor, tuple]]
    mixed: Callable[..., tuple[Tensor, tuple]]
    widest: Callable[..., int] | None = None


def in_blocks(c, layer, mixer: Mixer, s, *tensors) -> Iterator[tuple]:
    """(context, saved, *tensors) of each block of rows in which a half runs: all rows at once, if they fit."""
    blocks = c.row_blocks(mixer.widest(layer)) if mixer.widest else []
    if len(blocks) < 2:
        yield c, s, *tensors
        return
    for number, (start, stop) in enumerate(blocks):
        rows = (tensor.rows(start, stop) for tensor in tensors)
        yield c.of_rows(start, stop), s.of_rows(number, start, stop), *rows


def up_forward(c, layer, mixer: Mixer, x, s):
    """The first part of a half: norm, UP, and what the mixer keeps for the backward."""
    for block in in_blocks(c, layer, mixer, s, x):
        _up_rows(*block, layer, mixer)


def down_forward(c, layer, mixer: Mixer, x, out, s, scale=1.0):
    """The rest of a half: mixer, sub norm, DOWN, out norm and residual add. Writes out [rows, C], times `scale`.

    Only a half with an out norm may have a scale.
    """
    for block in in_blocks(c, layer, mixer, s, x, out):
        _down_rows(*block, layer, mixer, scale)


def _up_rows(c, s, x, layer, mixer):
    name, role = f"layers.{layer.index}.{mixer.input}", mixer.in_norm
    if role in layer.norms:
        n = norm_input(c, layer, role, mixer.up, x, s.rstd[role], name)
    else:
        n = plain_input(c, layer, role, mixer.up, x, name)
    y = mixer.up_buffer(c, layer, s)
    project(c, layer, mixer.up, y, n, s, width=layer.spec.norm_width(mixer.in_norm))
    mixer.keep(c, layer, y, s)


def _down_rows(c, s, x, out, layer, mixer, scale):
    m, scratch = mixer.mix(c, layer, s)
    n, width = _middle(c, layer, mixer, m, s), layer.spec.norm_width(mixer.sub_norm)
    if mixer.out_norm not in layer.norms:
        project(c, layer, mixer.down, out, n, s, width=width, residual=x)
    else:
        y, rstd, weight = s.unnormed[mixer.out_norm], s.rstd[mixer.out_norm], layer.norms[mixer.out_norm]
        project(c, layer, mixer.down, y, n, s, width=width)
        shape = {"rows": c.rows, "width": layer.spec.hidden}
        rmsnorm_forward(c.plan, out, rstd, y, weight, eps=c.config.rms_norm_eps, residual=x, out_scale=scale, **shape)
    c.work.give(*scratch)


def _middle(c, layer, mixer, m, s) -> Input:
    """The input of DOWN, given the mixer's output m."""
    name, role = f"layers.{layer.index}.{mixer.middle}", mixer.sub_norm
    if role not in layer.norms:
        return plain_input(c, layer, role, mixer.down, m, name)
    rstd = s.rstd.get(role) or c.work.take((c.rows,), label=f"rstd {role}")
    n = norm_input(c, layer, role, mixer.down, m, rstd, name)
    if role not in s.rstd:  # the backward recomputes it together with m
        c.work.give(rstd)
    return n
