"""What the forward of a layer leaves for its backward."""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor
from lorawgpu.lora.layout import GROUPS


def take_h(c, layer) -> dict:
    """Buffers of a layer's adapters: group name -> [rows, rank]. Layers differ in them."""
    return {name: c.keep(g.rank, f"h {name}") for name in GROUPS if (g := c.group(layer, name))}


@dataclass
class Saved:
    """Activations of one layer, f32 [rows, width]; the rest is cheap to compute again. None where it does not apply."""

    x: Tensor | None  # the layer's input; None: the caller's
    rstd_in: Tensor  # [rows]
    q: Tensor  # rotated
    k: Tensor  # the layer's KV cache
    v: Tensor
    a: Tensor  # attention's output
    lse: Tensor  # [rows, 2 NH]
    rstd_a: Tensor | None
    x1: Tensor
    rstd_post: Tensor
    gu: Tensor
    h: dict  # take_h

    @staticmethod
    def take(c, layer, cache=None) -> "Saved":
        """Buffers for one layer of the plan being recorded; `cache`: its (k, v) when they outlive the step."""
        w, heads, sub = c.widths, c.config.num_attention_heads, c.config.sub_norms
        k, v = cache or (c.keep(w.kv, "k"), c.keep(w.kv, "v"))

        def stat(name):
            return c.work.take((c.rows,), label=name, kept=True)

        return Saved(
            x=None,
            rstd_in=stat("rstd_in"),
            q=c.keep(w.q, "q"),
            k=k,
            v=v,
            a=c.keep(w.q, "attention"),
            lse=c.keep(2 * heads, "lse"),
            rstd_a=stat("rstd_a") if sub else None,
            x1=c.keep(w.hidden, "x1"),
            rstd_post=stat("rstd_post"),
            gu=c.keep(2 * w.mlp, "gate_up"),
            h=take_h(c, layer),
        )
