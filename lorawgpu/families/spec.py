"""The spec of one layer: its mixers, its norms by role, and the shapes of its linear layers.

All parts of a layer have the same form, and forward, backward and decoding read only its spec:

    x += [out norm]( DOWN( [sub norm]( mixer( UP( [in norm]( x ) ) ) ) ) )

The mixers are attention, the gated MLP and, in some models, the gate of a per-layer input.
"""

from dataclasses import dataclass, fields

from lorawgpu.families.rope import Rope

GROUPS = ("qkv", "o", "gate_up", "down", "ple_gate", "ple_proj")  # in forward order


@dataclass(frozen=True)
class Paths:
    """The linear layers of a layer by group, as paths below the layer's own.

    The linear layers of a group share an input and are one fused matrix on the GPU. A checkpoint may store them fused
    too: then the group is one path.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: tuple[str, ...] = ("self_attn.o_proj",)
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    ple_gate: tuple[str, ...] = ()
    ple_proj: tuple[str, ...] = ()

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group -> paths, for the groups that the layer has."""
        return {name: paths for name in GROUPS if (paths := getattr(self, name))}


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of attention. `scale` multiplies the scores.

    window: a token sees itself and the window - 1 tokens before it; None: all. softcap: score = cap tanh(score / cap).
    bias: q, k and v have biases. whole_norm: the norms of q and k run over all heads at once. v_norm: each head of v is
    normalized, without a weight. v_from_k: there is no v projection; v is the raw k. shares: the layer whose finished
    keys and values this one reads instead of its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    whole_norm: bool = False
    v_norm: bool = False
    v_from_k: bool = False
    shares: int | None = None

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Widths of the projections q, k and v that the layer has."""
        kv = 0 if self.shares is not None else 1 if self.v_from_k else 2
        return (self.q_width,) + (self.kv_width,) * kv


@dataclass(frozen=True)
class MlpSpec:
    """The gated feed-forward: m = act(gate) * up."""

    width: int
    act: str  # one of ops.gate.ACTIVATIONS


@dataclass(frozen=True)
class Norms:
    """Norms by role: the checkpoint's path below the layer's own, or None if the layer has no such norm.

    in: before UP; out: after DOWN, before the residual add; sub: between mixer and DOWN; q, k: before RoPE.
    """

    attn_in: str | None = "input_layernorm"
    mlp_in: str | None = "post_attention_layernorm"
    attn_sub: str | None = None
    mlp_sub: str | None = None
    attn_out: str | None = None
    mlp_out: str | None = None
    ple_out: str | None = None
    q: str | None = None
    k: str | None = None

    def paths(self) -> dict[str, str]:
        """Role -> path, for the norms that the layer has."""
        return {f.name: path for f in fields(self) if (path := getattr(self, f.name))}


@dataclass(frozen=True)
class LayerSpec:
    """One layer of width `hidden`.

    residual_scale: multiplies what attention and MLP add to the residual stream. per_layer_input: width of the
    embedding of the token that this layer alone reads; 0: none. scalar: the checkpoint has a `layer_scalar` that
    multiplies the layer's output.
    """

    hidden: int
    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms()
    paths: Paths = Paths()
    residual_scale: float = 1.0
    per_layer_input: int = 0
    scalar: bool = False

    def __post_init__(self):
        if bool(self.norms.q) != bool(self.norms.k) and self.attention.shares is None:
            raise ValueError("a layer has norms of both q and k, or of neither")

    def group_shapes(self, group: str) -> list[tuple[int, int]]:
        """`[out, in]` of the linear layers of a group, in the order of `paths`."""
        c, i = self.hidden, self.mlp.width
        outs, width = {
            "qkv": (self.attention.part_widths, c),
            "o": ((c,), self.attention.q_width),
            "gate_up": ((i, i), c),
            "down": ((c,), i),
            "ple_gate": ((self.per_layer_input,), c),
            "ple_proj": ((c,), self.per_layer_input),
        }[group]
        fused = len(getattr(self.paths, group)) == 1
        return [(out, width) for out in ((sum(outs),) if fused else outs)]

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of the linear layers by path below the layer's own, in forward order."""
        return {
            path: shape
            for group, paths in self.paths.groups().items()
            for path, shape in zip(paths, self.group_shapes(group), strict=True)
        }

    def bias_shapes(self) -> dict[str, tuple[int]]:
        """Shapes of the biases by the path of their linear layer."""
        if not self.attention.bias:
            return {}
        return {p: (out,) for p, (out, _) in zip(self.paths.qkv, self.group_shapes("qkv"), strict=True)}

    def norm_width(self, role: str) -> int:
        attention = self.attention
        widths = {"attn_sub": attention.q_width, "mlp_sub": self.mlp.width, "ple_sub": self.per_layer_input}
        q, k = (attention.q_width, attention.kv_width) if attention.whole_norm else (attention.head_dim,) * 2
        return (widths | {"q": q, "k": k}).get(role, self.hidden)

    def norm_shapes(self) -> dict[str, tuple[int]]:
        """Shapes of the norms by path below the layer's own."""
        return {path: (self.norm_width(role),) for role, path in self.norms.paths().items()}
