"""Gradient of the attention mixer; mirrors model/attention.py."""

from lorawgpu.model.attention import attention_options
from lorawgpu.ops.attention import attention_backward
from lorawgpu.ops.rope import rope_backward


def mix_backward(c, layer, da, s):
    """Return the gradient of the fused projection q | k | v, given da, that of attention's output. Frees da."""
    w, b, spec = layer.widths, c.batch, layer.spec.attention
    dq, (dk, dv), accumulate = c.take(w.q, "dq"), *_dkv(c, layer)
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
        accumulate_kv=accumulate,
        longest=c.ropes.positions,
        room=c.room,
        **attention_options(c, layer),
    )
    dqkv, table = c.take(w.qkv, "dqkv"), c.ropes.of(spec)
    own = (None, None) if spec.shares is not None else (dk, dv)
    options = {"rows": c.rows, "heads": layer.heads, "qkv": s.unnormed.get("qkv"), "constants": layer.constants}
    rope_backward(c.plan, dqkv, dq, *own, b.position, b.slot, table, **options)
    c.work.give(da, dq, *(tensor for tensor in own if tensor))
    return dqkv


def _dkv(c, layer):
    """dk and dv, and whether they hold a sum to add to.

    The layers that read another layer's keys and values, which come first in the backward, sum their gradients for it.
    """
    shares = layer.spec.attention.shares
    producer = layer.index if shares is None else shares
    found = c.shared_dkv.get(producer)
    dkv = found or (c.take(layer.widths.kv, "dk"), c.take(layer.widths.kv, "dv"))
    if shares is None:
        c.shared_dkv.pop(producer, None)
    else:
        c.shared_dkv[producer] = dkv
    return dkv, found is not None
