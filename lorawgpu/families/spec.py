"""What one layer is: its two mixers, its norms by role, and the shapes of its linear layers.

Both halves of a layer have one form, and the walks (`model/`, `backward/`) read nothing else about them:

    x += [out norm]( DOWN( [sub norm]( mixer( UP( in norm( x ) ) ) ) ) )       mixer: attention, or the gated MLP
"""

from dataclasses import dataclass, fields

from lorawgpu.families.rope import Rope

# The linear layers that share an input are one fused matrix on the GPU; paths below `model.layers.N.`.
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of a layer's attention; `scale` multiplies the scores."""

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
    """The checkpoint's path, below `model.layers.N.`, of each norm by its role; None: the layer has no such norm.

    in: before the first projection of a half; out: after its last one, before the residual add; sub: between the
    mixer and the last projection; q, k: of each head, before RoPE.
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
        """Those that the layer has: role -> path."""
        return {f.name: path for f in fields(self) if (path := getattr(self, f.name))}


@dataclass(frozen=True)
class LayerSpec:
    """One layer of width `hidden`."""

    hidden: int
    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of the linear layers by their path below `model.layers.N.`, in forward order."""
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
        """Shapes of the norms by their path below `model.layers.N.`."""
        return {path: (self.norm_width(role),) for role, path in self.norms.paths().items()}
