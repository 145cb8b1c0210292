"""The attention mixer: a = attention(rope([q norm] q), rope([k norm] k), v) of the fused projection q | k | v."""

from lorawgpu.model.sublayer import Mixer
from lorawgpu.ops.attention import attention_forward
from lorawgpu.ops.qk_norm import qk_norm_forward
from lorawgpu.ops.rope import rope_forward


def head_layout(layer) -> dict:
    """Head counts of the fused projection, and the columns where k and v begin."""
    spec, w = layer.spec.attention, layer.widths
    return {"n_heads": spec.heads, "n_kv_heads": spec.kv_heads, "k_off": w.k_off, "v_off": w.v_off}


def qk_norm_options(c, layer) -> dict:
    """Norm weights, sizes and eps for ops.qk_norm; empty if the layer has no norms of q and k."""
    if "q" not in layer.norms:
        return {}
    spec, w = layer.spec.attention, layer.widths
    sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    weights = {"q_weight": layer.norms["q"], "k_weight": layer.norms["k"]}
    return weights | sizes | {"k_off": w.k_off, "v_off": w.v_off, "eps": c.config.rms_norm_eps}


def attention_options(c, layer) -> dict:
    """Sizes, workspace and implementation for ops.attention, forward and backward."""
    spec = layer.spec.attention
    sizes = {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "scale": spec.scale}
    return sizes | {"workspace": c.work, "impl": c.attention}


def up_buffer(c, layer, s):
    return s.unnormed["qkv"] if "qkv" in s.unnormed else c.take(layer.widths.qkv, "qkv")


def keep(c, layer, qkv, s):
    """Write s.q, and s.k and s.v at the tokens' slots of the KV cache. Frees qkv unless it is saved."""
    scratch = qkv
    if options := qk_norm_options(c, layer):
        scratch = c.take(layer.widths.qkv, "normed qkv")
        qk_norm_forward(c.plan, scratch, qkv, rows=c.rows, **options)
    table, batch = c.ropes.of(layer.spec.attention), c.batch
    rope_forward(c.plan, s.q, s.k, s.v, scratch, batch.position, batch.slot, table, rows=c.rows, **head_layout(layer))
    c.work.give(scratch)


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
