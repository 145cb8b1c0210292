"""Gradient of the attention mixer; mirrors model/attention.py."""

from lorawgpu.model.attention import attention_options
from lorawgpu.ops.attention import attention_backward
from lorawgpu.ops.rope import rope_backward


def mix_backward(c, layer, da, s):
    """Return the gradient of the fused projection q | k | v, given da, that of attention's output. Frees da."""
    w, b = layer.widths, c.batch
    dq, dk, dv = c.take(w.q, "dq"), c.take(w.kv, "dk"), c.take(w.kv, "dv")
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
        **attention_options(c, layer),
    )
    dqkv, table = c.take(w.qkv, "dqkv"), c.ropes.of(layer.spec.attention)
    options = {"heads": layer.heads, "qkv": s.unnormed.get("qkv"), "constants": layer.constants}
    rope_backward(c.plan, dqkv, dq, dk, dv, b.position, b.slot, table, rows=c.rows, **options)
    c.work.give(da, dq, dk, dv)
    return dqkv
