"""Activations that the forward of a layer saves for its backward."""

from dataclasses import dataclass, field

from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu.tensor import Tensor


def take_h(c, layer) -> dict:
    """Buffers for h, the output of the A side: group name -> [rows, rank]. Layers may have different adapters."""
    return {name: c.keep(g.rank, f"h {name}") for name in GROUPS if (g := c.group(layer, name))}


@dataclass
class Saved:
    """Saved activations of one layer, f32 [rows, width]. The backward recomputes everything else."""

    x: Tensor | None  # the layer's input, set by the caller
    q: Tensor  # after RoPE
    k: Tensor  # k and v: the layer's KV cache
    v: Tensor
    a: Tensor  # the attention output
    lse: Tensor  # [rows, 2 NH]
    x1: Tensor  # the residual stream between the halves
    gu: Tensor
    rstd: dict = field(default_factory=dict)  # norm role -> [rows]
    unnormed: dict = field(default_factory=dict)  # inputs of norms: "qkv", "attn_out", "mlp_out"
    h: dict = field(default_factory=dict)  # from take_h

    @staticmethod
    def take(c, layer, cache=None) -> "Saved":
        """Take buffers for one layer. `cache`: the layer's (k, v), if they outlive the plan."""
        w, norms = layer.widths, layer.norms
        rstd = {}

        def stat(role):
            if role in norms:
                rstd[role] = c.work.take((c.rows,), label=f"rstd {role}", kept=True)

        k, v = cache or (c.keep(w.kv, "k"), c.keep(w.kv, "v"))
        stat("attn_in")
        q, a, lse = c.keep(w.q, "q"), c.keep(w.q, "attention"), c.keep(2 * layer.spec.attention.heads, "lse")
        stat("attn_sub")
        x1 = c.keep(w.hidden, "x1")
        stat("mlp_in")
        gu = c.keep(2 * w.mlp, "gate_up")
        unnormed = {}
        if layer.heads.normed:
            unnormed["qkv"] = c.keep(w.qkv, "qkv")
        for role in ("attn_out", "mlp_out"):
            stat(role)
            if role in norms:
                unnormed[role] = c.keep(w.hidden, f"before {role}")
        return Saved(None, q, k, v, a, lse, x1, gu, rstd, unnormed, take_h(c, layer))


@dataclass
class SharedSaved:
    """One set of buffers per layer spec, for passes in which nothing outlives a layer."""

    sets: dict = field(default_factory=dict)  # spec -> Saved

    def take(self, c, layer, cache=None) -> Saved:
        """The set of the layer's spec, with its own h, because layers of one spec may have different adapters."""
        if layer.spec not in self.sets:
            self.sets[layer.spec] = Saved.take(c, layer, cache)
            return self.sets[layer.spec]
        first = self.sets[layer.spec]
        fields = {**first.__dict__, "x": None, "h": take_h(c, layer)}
        return Saved(**fields | (dict(zip("kv", cache, strict=True)) if cache else {}))
