"""The frozen model on the GPU: embedding, layers of fused projections and norms, head."""

from dataclasses import dataclass
from functools import cached_property

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import GROUPS, LayerSpec
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.rope import Heads, head_constants
from lorawgpu.ops.weight import Weight
from lorawgpu.weights.device import pad_vector, stack_weight
from lorawgpu.weights.tensors import EMBEDDING


@dataclass(frozen=True)
class Widths:
    """Padded widths of a layer's activations, and the first columns of k and v in the fused projection."""

    hidden: int
    q: int
    kv: int
    mlp: int

    @property
    def qkv(self) -> int:
        return self.q + 2 * self.kv

    @property
    def k_off(self) -> int:
        return self.q

    @property
    def v_off(self) -> int:
        return self.q + self.kv

    @staticmethod
    def of(spec: LayerSpec) -> "Widths":
        attention = spec.attention
        return Widths(
            padded(spec.hidden), padded(attention.q_width), padded(attention.kv_width), padded(spec.mlp.width)
        )


HEAD_NORMS = ("q", "k")  # roles of the norms that run with RoPE


def heads_of(spec: LayerSpec, eps: float) -> Heads:
    """What happens between the fused projection and attention."""
    attention, widths = spec.attention, Widths.of(spec)
    return Heads(
        attention.heads,
        attention.kv_heads,
        attention.head_dim,
        rot=attention.head_dim,
        k_off=widths.k_off,
        v_off=widths.v_off,
        norm="head" if spec.norms.q else None,
        eps=eps,
    )


@dataclass(frozen=True)
class Layer:
    """One layer: its spec, its four fused projections by group (spec.GROUPS), its norms by role (spec.Norms).

    The norms of q and k are in `constants`, as ops.rope reads them.
    """

    index: int
    spec: LayerSpec
    weights: dict[str, Weight]  # group -> [fused out, in]
    norms: dict[str, Tensor]  # role -> [padded width]
    heads: Heads
    constants: Tensor | None  # [heads.constant_rows, widths.qkv]; None if that is empty

    @cached_property
    def widths(self) -> Widths:
        return Widths.of(self.spec)


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight  # the embedding itself when tied

    @property
    def hidden(self) -> int:
        """The padded width of the residual stream."""
        return padded(self.config.hidden_size)

    def matrices(self) -> dict[str, Weight]:
        """Every weight matrix by name; a tied head is the embedding and is listed once."""
        matrices = {"embedding": self.embedding}
        matrices |= {f"layers.{layer.index}.{group}": w for layer in self.layers for group, w in layer.weights.items()}
        return matrices if self.head is self.embedding else matrices | {"head": self.head}

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.matrices().values())


def load_model(device, checkpoint, progress=lambda name: None) -> Model:
    """Upload a checkpoint one fused projection at a time, so that the host never holds more than that."""
    config = checkpoint.config

    def vector(name):
        return checkpoint.dense(f"{name}.weight").float32()

    def norm(name):
        return device.upload(pad_vector(vector(name)), label=name, kind="weights")

    def projection(layer, group):
        names = [f"model.layers.{layer}.{path}.weight" for path in GROUPS[group]]
        progress(f"layers.{layer}.{group}")
        return stack_weight(device, [checkpoint.matrix(n) for n in names], f"layers.{layer}.{group}")

    def layer(index, spec):
        weights = {group: projection(index, group) for group in GROUPS}
        paths = {role: f"model.layers.{index}.{path}" for role, path in spec.norms.paths().items()}
        norms = {role: norm(path) for role, path in paths.items() if role not in HEAD_NORMS}
        heads, constants = heads_of(spec, config.rms_norm_eps), None
        if heads.constant_rows:
            weights_of = {f"{role}_norm": vector(paths[role]) for role in HEAD_NORMS if role in paths}
            values = head_constants(heads, Widths.of(spec).qkv, **weights_of)
            constants = device.upload(values, label=f"layers.{index}.constants", kind="weights")
        return Layer(index, spec, weights, norms, heads, constants)

    progress("embedding")
    embedding = stack_weight(device, [checkpoint.matrix(EMBEDDING)], "embedding")
    layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
    head = embedding
    if not config.tie_word_embeddings:
        head = stack_weight(device, [checkpoint.matrix(checkpoint.head_name)], "lm_head")
    return Model(config, embedding, layers, norm("model.norm"), head)
