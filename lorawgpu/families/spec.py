"""The spec of one layer: its two mixers, its norms by role, and the shapes of its linear layers.

Both halves of a layer have the same form, and forward, backward and decoding read only its spec:

    x += [out norm]( DOWN( [sub norm]( mixer( UP( in norm( x ) ) ) ) ) )       mixer: attention, or the gated MLP
"""

from dataclasses import dataclass, fields

from lorawgpu.families.rope import Rope

# Linear layers that share an input are one fused matrix on the GPU. Paths are below `model.layers.N.`.
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of attention. `scale` multiplies the scores."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class MlpSpec:
    """The gated feed-forward: m = act(gate) * up."""

    width: int
    act: str  # "relu2" | "silu"


@dataclass(frozen=True)
class Norms:
    """Norms by role: the checkpoint's path below `model.layers.N.`, or None if the layer has no such norm.

    in: before UP; out: after DOWN, before the residual add; sub: between mixer and DOWN; q, k: on each head, before
    RoPE.
    """

    attn_in: str = "input_layernorm"
    mlp_in: str = "post_attention_layernorm"
    attn_sub: str | None = None
    mlp_sub: str | None = None
    attn_out: str | None = None
    mlp_out: str | None = None
    q: str | None = None
    k: str | None = None

    def __post_init__(self):
        if bool(self.q) != bool(self.k):
            raise ValueError("a layer has norms of both q and k, or of neither")

    def paths(self) -> dict[str, str]:
        """Role -> path, for the norms that the layer has."""
        return {f.name: path for f in fields(self) if (path := getattr(self, f.name))}


@dataclass(frozen=True)
class LayerSpec:
    """One layer of width `hidden`."""

    hidden: int
    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of the linear layers by path below `model.layers.N.`, in forward order."""
        c, q, kv, i = self.hidden, self.attention.q_width, self.attention.kv_width, self.mlp.width
        return {
            "self_attn.q_proj": (q, c),
            "self_attn.k_proj": (kv, c),
            "self_attn.v_proj": (kv, c),
            "self_attn.o_proj": (c, q),
            "mlp.gate_proj": (i, c),
            "mlp.up_proj": (i, c),
            "mlp.down_proj": (c, i),
        }

    def norm_width(self, role: str) -> int:
        widths = {"attn_sub": self.attention.q_width, "mlp_sub": self.mlp.width}
        widths |= dict.fromkeys(("q", "k"), self.attention.head_dim)
        return widths.get(role, self.hidden)

    def norm_shapes(self) -> dict[str, tuple[int]]:
        """Shapes of the norms by path below `model.layers.N.`."""
        return {path: (self.norm_width(role),) for role, path in self.norms.paths().items()}
