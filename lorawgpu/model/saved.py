"""Activations that the forward of a layer saves for its backward."""

from dataclasses import dataclass, field, replace
from math import prod

from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu.tensor import Tensor, padded

ROLES = ("attn_in", "attn_sub", "mlp_in", "attn_out", "mlp_out", "ple_out")  # norms whose rstd is saved


def take_h(c, layer) -> dict:
    """Buffers for h, the output of the A side: group name -> [rows, rank]. Layers may have different adapters."""
    return {name: c.keep(g.rank, f"h {name}") for name in GROUPS if (g := c.group(layer, name))}


@dataclass
class Saved:
    """Saved activations of one layer, f32 [rows, width]. The backward recomputes everything else."""

    x: Tensor | None  # the layer's input, set by the caller
    q: Tensor  # after RoPE
    k: Tensor  # k and v: the layer's KV cache, or that of the layer it shares them with
    v: Tensor
    a: Tensor  # the attention output
    lse: Tensor  # [rows, 2 NH]
    x1: Tensor  # the residual stream between the halves
    gu: tuple  # gate and up, a tensor for each block of rows
    rstd: dict = field(default_factory=dict)  # norm role -> [rows]
    unnormed: dict = field(default_factory=dict)  # inputs of norms: "qkv", "attn_out", "mlp_out", "ple_out"
    h: dict = field(default_factory=dict)  # from take_h, set by the caller
    x2: Tensor | None = None  # with a per-layer input: the residual stream before it
    ple_gate: Tensor | None = None
    ple: Tensor | None = None

    @staticmethod
    def take(c, layer, cache=None, lend=None) -> "Saved":
        """Take buffers for one layer. `cache`: the (k, v) to use, if they outlive the layer.

        lend(shape, label): where the others come from; by default they are the layer's own.
        """
        w, rows, normed = layer.widths, c.rows, [role for role in ROLES if role in layer.norms]
        lend = lend or (lambda shape, label: c.work.take(shape, label=label, kept=True))

        def keep(width, label):
            return lend((rows, width), label)

        k, v = cache or (keep(w.kv, "k"), keep(w.kv, "v"))
        saved = Saved(
            x=None,
            q=keep(w.q, "q"),
            k=k,
            v=v,
            a=keep(w.q, "attention"),
            lse=keep(2 * layer.spec.attention.heads, "lse"),
            x1=keep(w.hidden, "x1"),
            gu=tuple(
                lend((stop - start, w.gate_up), f"gate_up {i}" if i else "gate_up")
                for i, (start, stop) in enumerate(c.row_blocks(w.gate_up))
            ),
            rstd={role: lend((rows,), f"rstd {role}") for role in normed},
            unnormed={role: keep(w.hidden, f"before {role}") for role in normed if role.endswith("out")},
        )
        if layer.heads.normed:
            saved.unnormed["qkv"] = keep(w.qkv, "qkv")
        if layer.spec.per_layer_input:
            width = padded(layer.spec.per_layer_input)
            saved.x2 = keep(w.hidden, "x2")
            saved.ple_gate, saved.ple = keep(width, "per-layer gate"), keep(width, "per-layer input")
        return saved

    def of_rows(self, block: int, start: int, stop: int) -> "Saved":
        """What the feed-forward half saves for a block of rows: number `block`, rows [start, stop)."""

        def cut(tensors: dict) -> dict:
            return {name: tensor.rows(start, stop) for name, tensor in tensors.items()}

        return replace(self, gu=(self.gu[block],), rstd=cut(self.rstd), unnormed=cut(self.unnormed), h=cut(self.h))

    def between(self) -> list[Tensor]:
        """The residual stream after each half but the last."""
        return [x for x in (self.x1, self.x2) if x]


class SharedSaved:
    """One set of buffers for all layers, for passes in which nothing outlives a layer: each is as large as the layer
    that needs most of it."""

    def __init__(self, c):
        self.c, self.sizes, self.buffers = c, {}, {}
        for layer in {layer.spec: layer for layer in c.model.layers}.values():
            Saved.take(c, layer, lend=self._measure)

    def take(self, layer, cache=None) -> Saved:
        """The set for one layer."""
        return Saved.take(self.c, layer, cache, self._lend)

    def _measure(self, shape, label):
        self.sizes[label] = max(self.sizes.get(label, 0), prod(shape))

    def _lend(self, shape, label) -> Tensor:
        if label not in self.buffers:
            self.buffers[label] = self.c.work.take((self.sizes[label],), label=label, kept=True)
        return self.buffers[label].view(0, shape)
