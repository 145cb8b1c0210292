"""The forward pass for one new token of a few sequences: each half of a layer takes four or five dispatches.

    (n, h) = in norm(x)    y = UP(n)    parts = attention(y, cache)    (n, h) = sub norm(mixed)    x += DOWN(n)

One dispatch computes a norm and the A side of the adapters; another a product, the B side and the residual add. The
gate and the sum over attention's splits run in the dispatch that reads them. A norm before the residual add is a
separate dispatch, and so are norms of q and k together with RoPE.
"""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.model.attention import ATTENTION
from lorawgpu.model.embedding import embed
from lorawgpu.model.head import HeadAdapter, trained_logits
from lorawgpu.model.mlp import MLP, gate_options
from lorawgpu.model.per_layer import PER_LAYER, per_layer_input
from lorawgpu.model.sublayer import Mixer
from lorawgpu.ops.attention_decode import attention_decode, attention_decode_prepared, fits, parts_shape, stats_shape
from lorawgpu.ops.decode_state import field
from lorawgpu.ops.lora import lora_up
from lorawgpu.ops.matvec import (
    MAX_PIECES,
    LoraA,
    MatvecInput,
    input_kind,
    matvec_forward,
    matvec_input,
    pieces_of,
    takes,
)
from lorawgpu.ops.rmsnorm import rmsnorm_forward
from lorawgpu.ops.rope import rope_forward
from lorawgpu.weights.device_model import Model


def decodes(model: Model, rows: int) -> bool:
    """Whether this pass supports the model and number of sequences. The whole-sequence pass supports all."""
    return takes(rows) and all(fits(layer.attention.head_dim) for layer in model.config.layers)


@dataclass(frozen=True)
class Scratch:
    """Buffers that all layers share, as large as the widest layer needs."""

    x: Tensor  # [rows, C] the residual stream; alternates with `other` if a norm precedes the residual add
    qkv: Tensor
    gu: Tensor
    parts: Tensor  # attention's partial sums, by split
    stats: Tensor
    n: Tensor  # input of a projection, f32, int8 words or digits
    qscale: Tensor
    h: Tensor  # output of the A side, in pieces
    q: Tensor | None = None  # finished queries, of layers whose attention does not make them
    ple: tuple = ()  # per-layer input: the gate, the projection of the embedding, the input itself
    other: Tensor | None = None
    unnormed: Tensor | None = None  # [rows, C] the input of that norm
    rstd: Tensor | None = None

    @staticmethod
    def take(c, rank: int) -> "Scratch":
        """rank: the largest total rank of a group."""
        layers, take, roles = c.model.layers, c.work.take, {r for layer in c.model.layers for r in layer.norms}

        def widest(name: str) -> int:
            return max(getattr(layer.widths, name) for layer in layers)

        heads = max(layer.spec.attention.heads for layer in layers)
        x, qkv, gu = c.take(c.hidden, "x"), c.take(widest("qkv"), "qkv"), c.take(widest("gate_up"), "gate_up")
        parts = take(parts_shape(c.rows, widest("q")), label="attention parts")
        stats = take(stats_shape(c.rows, heads), label="attention stats")
        n = take((c.rows * max(widest(name) for name in ("hidden", "q", "mlp")),), label="projection input")
        qscale, h = c.take(2, "qscale", "u32"), take((c.rows * MAX_PIECES * max(rank, 4),), label="h")
        q = None if all(layer.heads.plain for layer in layers) else c.take(widest("q"), "q")
        width = padded(c.config.per_layer_input)
        ple = tuple(c.take(width, name) for name in ("per-layer gate", "projection", "input")) if width else ()
        other = unnormed = rstd = None
        if roles & {"attn_out", "mlp_out", "ple_out"}:
            other, unnormed, rstd = c.take(c.hidden, "x"), c.take(c.hidden, "unnormed"), take((c.rows,), label="rstd")
        return Scratch(x, qkv, gu, parts, stats, n, qscale, h, q, ple, other, unnormed, rstd)


def decode_forward(c, rows: Tensor, caches, s: Scratch) -> Tensor:
    """Return the last hidden state of the tokens in `rows` (ops.decode_state); their k and v go to the caches."""
    x = s.x
    embed(c, x, field(rows, "ids", c.rows))
    if c.config.per_layer_input:
        c.embedded = c.take(c.hidden, "embedded")
        embed(c, c.embedded, field(rows, "ids", c.rows))
    for layer, cache in zip(c.model.layers, caches, strict=True):
        with c.plan.scope(f"layers.{layer.index}"):
            qkv = _up(c, layer, ATTENTION, _view(s.qkv, c.rows, layer.widths.qkv), x, s)
            x = _down(c, layer, ATTENTION, _attention(c, layer, qkv, rows, cache, s), x, s)
            gu = _up(c, layer, MLP, _view(s.gu, c.rows, layer.widths.gate_up), x, s)
            gate = gate_options(layer)
            gate.pop("width")
            last = 1.0 if layer.spec.per_layer_input else layer.scalar
            x = _down(c, layer, MLP, MatvecInput("gate", gu, **gate), x, s, last)
            if layer.spec.per_layer_input:
                g = _up(c, layer, PER_LAYER, s.ple[0], x, s)
                x = _down(c, layer, PER_LAYER, _per_layer(c, layer, g, s), x, s, layer.scalar)
    return x


def decode_head(c, logits: Tensor, x: Tensor, s: Scratch) -> None:
    """logits [rows, V] = rmsnorm(x, norm) head^T, with what the adapter trains of the head."""
    adapter, lora_a, lora = HeadAdapter.take(c, c.rows), None, None
    if adapter.group:
        lora_a, lora = _lora(c, adapter.group, adapter.h.view(0, (c.rows, 1, adapter.group.rank)))
    with c.plan.scope("head"):
        n = _input(c, c.head, s)
        matvec_input(
            c.plan,
            n,
            MatvecInput("rows", x),
            c.state,
            rows=c.rows,
            width=c.config.hidden_size,
            eps=c.config.rms_norm_eps,
            record_id=c.non_finite.id("norm"),
            weight=c.model.norm,
            lora_a=lora_a,
        )
        matvec_forward(c.plan, logits, n, c.head, rows=c.rows, lora=lora)
        if adapter.columns:
            normed, rstd = c.take(c.hidden, "norm"), c.work.take((c.rows,), label="rstd")
            shape = {"rows": c.rows, "width": c.config.hidden_size}
            rmsnorm_forward(c.plan, normed, rstd, x, c.model.norm, eps=c.config.rms_norm_eps, **shape)
            trained_logits(c, logits, normed, c.rows, adapter)


def _lora(c, group, h: Tensor) -> tuple:
    """The A side of a group's adapters, for `matvec_input`, and the B side, for `matvec_forward`."""
    a = LoraA(h, group.a_all(c.adapter.params), tuple((p.h, p.scale) for p in group.paths))
    return a, lora_up(group, h, c.adapter.params)


def _view(tensor: Tensor, *shape: int) -> Tensor:
    """The start of a buffer that wider layers share."""
    return tensor if tensor.shape == shape else tensor.view(0, shape)


def _input(c, weight, s: Scratch) -> Tensor:
    """The buffer of a projection's input, as `weight` needs it."""
    kind = input_kind(weight)
    shape = (c.rows, weight.columns // (4 if kind == "int8" else 1))
    return Tensor(s.n.buffer, shape, "f32" if kind == "f32" else "u32", s.n.offset, "projection input")


def _up(c, layer, mixer: Mixer, y: Tensor, x: Tensor, s: Scratch) -> Tensor:
    """y = UP(in norm(x))."""
    _project(c, layer, mixer.up, mixer.in_norm, y, MatvecInput("rows", x), s)
    return y


def _per_layer(c, layer, g: Tensor, s: Scratch) -> MatvecInput:
    """The layer's own input, and the gate that reads it."""
    _, projected, ple = s.ple
    matvec_forward(c.plan, projected, c.embedded, layer.per_layer_model, rows=c.rows)
    per_layer_input(c, layer, ple, projected)
    return MatvecInput("gate", g, act=layer.spec.mlp.act, up=ple)


def _down(c, layer, mixer: Mixer, mixed: MatvecInput, x: Tensor, s: Scratch, scale=1.0) -> Tensor:
    """Return x + [out norm](DOWN([sub norm](mixed))), times scale, in x itself or in the other buffer of the stream."""
    if mixer.out_norm not in layer.norms:
        _project(c, layer, mixer.down, mixer.sub_norm, x, mixed, s, accumulate=True)
        return x
    _project(c, layer, mixer.down, mixer.sub_norm, s.unnormed, mixed, s)
    out, weight = s.other if x is s.x else s.x, layer.norms[mixer.out_norm]
    shape = {"rows": c.rows, "width": layer.spec.hidden}
    rmsnorm_forward(
        c.plan, out, s.rstd, s.unnormed, weight, eps=c.config.rms_norm_eps, residual=x, out_scale=scale, **shape
    )
    return out


def _attention(c, layer, qkv, rows, cache, s) -> MatvecInput:
    """Attention's parts. A layer with norms, biases and the like finishes q, k and v in a dispatch of its own."""
    spec, w = layer.spec.attention, layer.widths
    parts, stats = _view(s.parts, *parts_shape(c.rows, w.q)), _view(s.stats, *stats_shape(c.rows, spec.heads))
    sizes = {"count": c.rows, "heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
    options = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
    if layer.heads.plain:
        offsets = {"k_off": w.k_off, "v_off": w.v_off}
        attention_decode(c.plan, parts, stats, *cache, qkv, c.ropes.of(spec), rows, **offsets, **sizes, **options)
    else:
        q = _view(s.q, c.rows, w.q)
        position, slot = (field(rows, name, c.rows) for name in ("position", "slot"))
        own = (None, None) if spec.shares is not None else cache
        made = {"rows": c.rows, "heads": layer.heads, "constants": layer.constants}
        rope_forward(c.plan, q, *own, qkv, position, slot, c.ropes.of(spec), **made)
        longest = c.ropes.positions
        attention_decode_prepared(c.plan, parts, stats, *cache, q, rows, longest=longest, **sizes, **options)
    return MatvecInput("attention", parts, stats=stats, head_dim=spec.head_dim)


def _project(c, layer, name, role, y, source, s, accumulate=False):
    """y (+)= W(norm(source)) with the adapters of group `name`. No norm if the layer has none for `role`."""
    weight, group = layer.weights[name], c.group(layer, name)
    lora_a = lora = None
    if group:
        pieces = pieces_of(source, layer.spec.norm_width(role), role in layer.norms, weight.int8_input)
        lora_a, lora = _lora(c, group, s.h.view(0, (c.rows, pieces, group.rank)))
    out, qscale = _input(c, weight, s), s.qscale if weight.int8_input else None
    with c.plan.scope(name):
        matvec_input(
            c.plan,
            out,
            source,
            c.state,
            rows=c.rows,
            width=layer.spec.norm_width(role),
            eps=c.config.rms_norm_eps,
            record_id=c.non_finite.id(f"layers.{layer.index}.{name}"),
            weight=layer.norms.get(role),
            qscale=qscale,
            lora_a=lora_a,
        )
        matvec_forward(c.plan, y, out, weight, rows=c.rows, qscale=qscale, lora=lora, accumulate=accumulate)
