"""The mixer of the per-layer input: m = act(g) * ple, where ple depends on the token and the layer alone.

    ple = (rmsnorm(W e / sqrt(C)) + sqrt(P) table[id, layer]) / sqrt(2)         e: the scaled embedding

Nothing of ple is trained. Source: Gemma4TextModel.project_per_layer_inputs of transformers.
"""

from lorawgpu.model.sublayer import Mixer
from lorawgpu.ops.gate import gate_forward
from lorawgpu.ops.linear import linear_forward
from lorawgpu.ops.per_layer import per_layer_forward


def gate_options(layer, s) -> dict:
    """Sizes and options of ops.gate, forward and backward."""
    return {"width": layer.spec.per_layer_input, "act": layer.spec.mlp.act, "up": s.ple}


def up_buffer(c, layer, s):
    return s.ple_gate


def keep(c, layer, g, s):
    """Write s.ple."""
    projected = c.take(s.ple.shape[1], "per-layer projection")
    linear_forward(c.plan, projected, c.embedded, layer.per_layer_model, rows=c.rows)
    per_layer_input(c, layer, s.ple, projected)
    c.work.give(projected)


def per_layer_input(c, layer, ple, projected):
    """Write ple [rows, padded(P)] from W e [rows, padded(P)]."""
    per_layer_forward(
        c.plan,
        ple,
        projected,
        c.batch.per_layer[layer.index],
        c.model.per_layer.norm,
        rows=c.rows,
        width=layer.spec.per_layer_input,
        scale=c.config.hidden_size**-0.5,
        eps=c.config.rms_norm_eps,
    )


def mix(c, layer, s):
    """Write m into scratch. It is cheap, so the backward recomputes it."""
    m, record_id = c.take(s.ple.shape[1], "per-layer m"), c.non_finite.id(f"layers.{layer.index}.ple_gate")
    gate_forward(c.plan, m, s.ple_gate, c.state, rows=c.rows, record_id=record_id, **gate_options(layer, s))
    return m, (m,)


PER_LAYER = Mixer(
    up="ple_gate",
    down="ple_proj",
    in_norm="ple_in",
    sub_norm="ple_sub",
    out_norm="ple_out",
    input="post_feedforward",
    middle="per_layer",
    up_buffer=up_buffer,
    keep=keep,
    mix=mix,
    mixed=mix,
)
