"""x1 = x + O(rmsnorm(attention(rope(Q n), rope(K n), V n), attn_sub_norm)),  n = rmsnorm(x, input_layernorm)."""

from lorawgpu.model.linear import norm_input, plain_input, project
from lorawgpu.ops.attention import attention_forward
from lorawgpu.ops.rope import rope_forward


def attention_block_forward(c, layer, x, s):
    """Writes s.x1 and all that the backward needs of the first half of the block."""
    cfg, w = c.config, c.widths
    width, quantised = cfg.num_attention_heads * cfg.head_dim, layer.o.int8_input
    group = c.group(layer, "qkv")
    n = norm_input(
        c,
        x,
        layer.input_layernorm,
        s.rstd_in,
        width=cfg.hidden_size,
        quantised=layer.qkv.int8_input,
        keep=group,
        name=f"layers.{layer.index}.input",
    )
    qkv = c.take(w.qkv, "qkv")
    project(c, layer, "qkv", qkv, n, s, width=cfg.hidden_size)
    rope_forward(
        c.plan,
        s.q,
        s.k,
        s.v,
        qkv,
        c.batch.position,
        c.batch.slot,
        c.rope,
        rows=c.rows,
        n_heads=cfg.num_attention_heads,
        n_kv_heads=cfg.num_key_value_heads,
        k_off=w.k_off,
        v_off=w.v_off,
    )
    c.work.give(qkv)
    attention_forward(
        c.plan,
        s.a,
        s.lse,
        s.q,
        s.k,
        s.v,
        c.batch.slot,
        c.batch.kv_start,
        workspace=c.work,
        heads=cfg.num_attention_heads,
        kv_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        scale=cfg.attention_scale,
        impl=c.attention,
    )
    group, name = c.group(layer, "o"), f"layers.{layer.index}.attention"
    if layer.attn_sub_norm:
        n = norm_input(c, s.a, layer.attn_sub_norm, s.rstd_a, width=width, quantised=quantised, keep=group, name=name)
    else:
        n = plain_input(c, s.a, width=width, quantised=quantised, name=name)
    project(c, layer, "o", s.x1, n, s, width=width, residual=x)
