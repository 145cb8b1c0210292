"""x2 = x1 + DOWN(rmsnorm(act(GATE h) * UP h, ffn_sub_norm)),  h = rmsnorm(x1, post_attention_layernorm)."""

from lorawgpu.model.linear import norm_input, plain_input, project
from lorawgpu.ops.gate import gate_forward


def gate_up_forward(c, layer, s):
    """Writes s.gu: the part of the half block that the backward reads."""
    cfg, group = c.config, c.group(layer, "gate_up")
    n = norm_input(
        c,
        s.x1,
        layer.post_attention_layernorm,
        s.rstd_post,
        width=cfg.hidden_size,
        keep=group,
        quantised=layer.gate_up.int8_input,
        name=f"layers.{layer.index}.post_attention",
    )
    project(c, layer, "gate_up", s.gu, n, s, width=cfg.hidden_size)


def gate(c, layer, s):
    """m = act(g) * u, in scratch: cheap enough that the backward computes it again."""
    m = c.take(c.widths.mlp, "m")
    gate_forward(
        c.plan,
        m,
        s.gu,
        c.state,
        rows=c.rows,
        width=c.config.intermediate_size,
        act=c.config.act,
        record_id=c.watch.id(f"layers.{layer.index}.gate_up"),
    )
    return m


def down_forward(c, layer, x2, s):
    """x2 = x1 + DOWN(...)."""
    width, group = c.config.intermediate_size, c.group(layer, "down")
    m, name = gate(c, layer, s), f"layers.{layer.index}.middle"
    if layer.ffn_sub_norm:
        rstd = c.work.take((c.rows,), label="rstd_m")
        n = norm_input(
            c, m, layer.ffn_sub_norm, rstd, width=width, quantised=layer.down.int8_input, keep=group, name=name
        )
        c.work.give(rstd)
    else:
        n = plain_input(c, m, width=width, quantised=layer.down.int8_input, name=name)
    project(c, layer, "down", x2, n, s, width=width, residual=s.x1)
    c.work.give(m)
