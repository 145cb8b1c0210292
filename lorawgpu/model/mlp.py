"""The mixer of the feed-forward half: m = act(g) * u of the fused projection g | u.

Its activations are the widest of a layer, and no row reads another, so it runs in blocks of rows where a binding has no
room for all.
"""

from lorawgpu.model.sublayer import Mixer
from lorawgpu.ops.gate import gate_forward


def gate_options(layer) -> dict:
    """Sizes and options of ops.gate, forward and backward."""
    spec = layer.spec.mlp
    return {"width": spec.width, "act": spec.act, "scale": layer.spec.residual_scale, "up_off": layer.widths.up_off}


def up_buffer(c, layer, s):
    (gu,) = s.gu
    return gu


def keep(c, layer, gu, s):
    """Nothing to do: UP wrote it."""


def mix(c, layer, s):
    """Write m into scratch. It is cheap, so the backward recomputes it."""
    m, record_id = c.take(layer.widths.mlp, "m"), c.non_finite.id(f"layers.{layer.index}.gate_up")
    gate_forward(c.plan, m, *s.gu, c.state, rows=c.rows, record_id=record_id, **gate_options(layer))
    return m, (m,)


MLP = Mixer(
    up="gate_up",
    down="down",
    in_norm="mlp_in",
    sub_norm="mlp_sub",
    out_norm="mlp_out",
    input="post_attention",
    middle="middle",
    up_buffer=up_buffer,
    keep=keep,
    mix=mix,
    mixed=mix,
    widest=lambda layer: layer.widths.gate_up,
)
