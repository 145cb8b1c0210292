"""The attention mixer: a = attention(rope([q norm] q), rope([k norm] k), v) of the fused projection q | k | v."""

from lorawgpu.model.sublayer import Mixer
from lorawgpu.ops.attention import attention_forward
from lorawgpu.ops.rope import rope_forward


def attention_options(c, layer) -> dict:
    """Sizes, workspace and implementation for ops.attention, forward and backward."""
    spec = layer.spec.attention
    sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "scale": spec.scale}
    return sizes | {"workspace": c.work, "impl": c.attention}


def up_buffer(c, layer, s):
    return s.unnormed["qkv"] if "qkv" in s.unnormed else c.take(layer.widths.qkv, "qkv")


def keep(c, layer, qkv, s):
    """Write s.q, and s.k and s.v at the tokens' slots of the KV cache. Frees qkv unless it is saved."""
    b, table, options = c.batch, c.ropes.of(layer.spec.attention), {"heads": layer.heads, "constants": layer.constants}
    rope_forward(c.plan, s.q, s.k, s.v, qkv, b.position, b.slot, table, rows=c.rows, **options)
    if not layer.heads.normed:
        c.work.give(qkv)


def mix(c, layer, s):
    batch, options = c.batch, attention_options(c, layer)
    attention_forward(c.plan, s.a, s.lse, s.q, s.k, s.v, batch.slot, batch.kv_start, **options)
    return s.a, ()


def mixed(c, layer, s):
    return s.a, ()


ATTENTION = Mixer(
    up="qkv",
    down="o",
    in_norm="attn_in",
    sub_norm="attn_sub",
    out_norm="attn_out",
    input="input",
    middle="attention",
    up_buffer=up_buffer,
    keep=keep,
    mix=mix,
    mixed=mixed,
)
