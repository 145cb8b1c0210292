"""The forward walk for one new token of a few sequences: the equations of attention.py and mlp.py in nine dispatches.

    (n, h) = norm(x)      qkv = Q|K|V(n)      parts = attention(qkv, cache)      (n, h) = norm(parts)      x += O(n)
    (n, h) = norm(x)      gu = GATE|UP(n)                                        (n, h) = norm(act gu)     x += DOWN(n)

A norm and the A side of the adapters are one dispatch, and so are a product, the B side and the residual add.
"""

from dataclasses import dataclass

from lorawgpu.families.config import ModelConfig
from lorawgpu.gpu.tensor import Tensor
from lorawgpu.ops.attention_decode import attention_decode, fits, parts_shape, stats_shape
from lorawgpu.ops.decode_state import field
from lorawgpu.ops.embedding import embedding_forward
from lorawgpu.ops.lora import lora_up
from lorawgpu.ops.matvec import MAX_ROWS, Down, Source, matvec_forward, matvec_input


def decodes(config: ModelConfig, rows: int) -> bool:
    """Whether this walk serves a model and a number of sequences; the whole-sequence walk serves all."""
    return rows <= MAX_ROWS and fits(config.head_dim)


@dataclass(frozen=True)
class Scratch:
    """Buffers that all layers share."""

    x: Tensor  # [rows, C] the residual stream
    qkv: Tensor
    gu: Tensor
    parts: Tensor  # of the attention, by split
    stats: Tensor
    n: Tensor  # the widest input of a projection, f32 or int8 words
    qscale: Tensor
    h: Tensor  # the widest down-projection

    @staticmethod
    def take(c, rank: int) -> "Scratch":
        """rank: the largest of any group."""
        w, take = c.widths, c.work.take
        return Scratch(
            c.take(w.hidden, "x"),
            c.take(w.qkv, "qkv"),
            c.take(2 * w.mlp, "gate_up"),
            take(parts_shape(c.rows, w.q), label="attention parts"),
            take(stats_shape(c.rows, c.config.num_attention_heads), label="attention stats"),
            take((c.rows * max(w.hidden, w.q, w.mlp),), label="projection input"),
            c.take(2, "qscale", "u32"),
            take((c.rows * max(rank, 4),), label="h"),
        )


def decode_forward(c, rows: Tensor, caches, s: Scratch) -> None:
    """The last hidden state of the tokens in `rows` (ops.rows), into s.x; their k and v go to the caches."""
    parts = c.model.embedding.parts
    shape = {"rows": c.rows, "width": c.config.hidden_size}
    embedding_forward(c.plan, s.x, field(rows, "ids", c.rows), parts, scale=c.config.embed_scale, **shape)
    for layer, (k, v) in zip(c.model.layers, caches, strict=True):
        with c.plan.scope(f"layers.{layer.index}"):
            _attention(c, layer, rows, k, v, s)
            _mlp(c, layer, s)


def decode_head(c, logits: Tensor, s: Scratch) -> None:
    """logits [rows, V] = rmsnorm(s.x, norm) head^T."""
    with c.plan.scope("head"):
        n = s.n.view(0, (c.rows, c.widths.hidden))
        matvec_input(
            c.plan,
            n,
            Source("rows", s.x),
            c.state,
            rows=c.rows,
            width=c.config.hidden_size,
            eps=c.config.rms_norm_eps,
            record_id=c.watch.id("norm"),
            weight=c.model.norm,
        )
        matvec_forward(c.plan, logits, n, c.model.head, rows=c.rows)


def _attention(c, layer, rows, k, v, s):
    cfg, w = c.config, c.widths
    _project(c, layer, "qkv", s.qkv, Source("rows", s.x), layer.input_layernorm, cfg.hidden_size, s)
    attention_decode(
        c.plan,
        s.parts,
        s.stats,
        k,
        v,
        s.qkv,
        c.rope,
        rows,
        count=c.rows,
        heads=cfg.num_attention_heads,
        kv_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        k_off=w.k_off,
        v_off=w.v_off,
        scale=cfg.attention_scale,
    )
    source = Source("attention", s.parts, stats=s.stats, head_dim=cfg.head_dim)
    width = cfg.num_attention_heads * cfg.head_dim
    _project(c, layer, "o", s.x, source, layer.attn_sub_norm, width, s, accumulate=True)


def _mlp(c, layer, s):
    cfg = c.config
    _project(c, layer, "gate_up", s.gu, Source("rows", s.x), layer.post_attention_layernorm, cfg.hidden_size, s)
    source = Source("gate", s.gu, act=cfg.act)
    _project(c, layer, "down", s.x, source, layer.ffn_sub_norm, cfg.intermediate_size, s, accumulate=True)


def _project(c, layer, name, y, source, norm, width, s, accumulate=False):
    """y (+)= W(norm(source)) with the adapters of group `name`; norm None: the source itself."""
    weight, group = getattr(layer, name), c.group(layer, name)
    down = h = None
    if group:
        h = s.h.view(0, (c.rows, group.rank))
        down = Down(h, group.a_all(c.adapter.params), tuple((p.h, p.scale) for p in group.paths))
    int8, columns = weight.int8_input, weight.columns
    out = s.n.view(0, (c.rows, columns))
    if int8:
        out = Tensor(s.n.buffer, (c.rows, columns // 4), "u32", s.n.offset, "xq")
    with c.plan.scope(name):
        matvec_input(
            c.plan,
            out,
            source,
            c.state,
            rows=c.rows,
            width=width,
            eps=c.config.rms_norm_eps,
            record_id=c.watch.id(f"layers.{layer.index}.{name}"),
            weight=norm,
            qscale=s.qscale if int8 else None,
            down=down,
        )
        lora = lora_up(group, h, c.adapter.params) if group else None
        qscale = s.qscale if int8 else None
        matvec_forward(c.plan, y, out, weight, rows=c.rows, qscale=qscale, lora=lora, accumulate=accumulate)
