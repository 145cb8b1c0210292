"""Gradient of the attention half block; mirrors model/attention.py from its last line to its first."""

from functools import partial

from lorawgpu.backward.linear import project_backward, renorm
from lorawgpu.ops.attention import attention_backward
from lorawgpu.ops.rmsnorm import rmsnorm_backward
from lorawgpu.ops.rope import rope_backward


def o_backward(c, layer, dx, s, *, below: bool):
    """From dx (the gradient of x1) to da, which is returned; None when nothing below needs it."""
    width = c.config.num_attention_heads * c.config.head_dim

    def source():
        if layer.attn_sub_norm is None:
            return s.a, ()
        return renorm(c, s.a, layer.attn_sub_norm, s.rstd_a, width, "norm a")

    da = c.take(c.widths.q, "da") if below else None
    project_backward(c, layer, "o", da, dx, source, s, width=width)
    if below and layer.attn_sub_norm:
        dn, da = da, c.take(c.widths.q, "da")
        rmsnorm_backward(c.plan, da, dn, s.a, layer.attn_sub_norm, s.rstd_a, rows=c.rows, width=width, accumulate=False)
        c.work.give(dn)
    return da


def qkv_backward(c, layer, dx, da, s, *, below: bool):
    """dx += the gradient that reaches x through attention; frees da."""
    cfg, w = c.config, c.widths
    heads = {"heads": cfg.num_attention_heads, "kv_heads": cfg.num_key_value_heads, "head_dim": cfg.head_dim}
    dq, dk, dv = c.take(w.q, "dq"), c.take(w.kv, "dk"), c.take(w.kv, "dv")
    b = c.batch
    attention_backward(
        c.plan,
        dq=dq,
        dk=dk,
        dv=dv,
        dout=da,
        out=s.a,
        lse=s.lse,
        q=s.q,
        kcache=s.k,
        vcache=s.v,
        slot=b.slot,
        kv_start=b.kv_start,
        segment_end=b.segment_end,
        workspace=c.work,
        scale=cfg.attention_scale,
        impl=c.attention,
        **heads,
    )
    dqkv = c.take(w.qkv, "dqkv")
    rope_backward(
        c.plan,
        dqkv,
        dq,
        dk,
        dv,
        b.position,
        b.slot,
        c.rope,
        rows=c.rows,
        n_heads=cfg.num_attention_heads,
        n_kv_heads=cfg.num_key_value_heads,
        k_off=w.k_off,
        v_off=w.v_off,
    )
    c.work.give(da, dq, dk, dv)
    dn = c.take(w.hidden, "dnorm") if below else None
    source = partial(renorm, c, s.x, layer.input_layernorm, s.rstd_in, cfg.hidden_size, "norm x")
    project_backward(c, layer, "qkv", dn, dqkv, source, s, width=cfg.hidden_size)
    c.work.give(dqkv)
    if below:
        rmsnorm_backward(
            c.plan, dx, dn, s.x, layer.input_layernorm, s.rstd_in, rows=c.rows, width=cfg.hidden_size, accumulate=True
        )
        c.work.give(dn)
