"""The frozen model on the GPU: embedding, layers of fused projections and norms, head."""

import math
from dataclasses import dataclass
from functools import cached_property

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import GROUPS, LayerSpec
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.weight import Weight
from lorawgpu.util.progress import progress
from lorawgpu.weights.device import pad_vector, stack_weight
from lorawgpu.weights.tensors import EMBEDDING, expected_tensors


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


@dataclass(frozen=True)
class Layer:
    """One layer: its spec, its four fused projections by group (spec.GROUPS), its norms by role (spec.Norms)."""

    index: int
    spec: LayerSpec
    weights: dict[str, Weight]  # group -> [fused out, in]
    norms: dict[str, Tensor]  # role -> [padded width]

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


def load_model(device, checkpoint) -> Model:
    """Upload a checkpoint one fused projection at a time, so that the host never holds more than that."""
    config = checkpoint.config
    shapes = expected_tensors(config)
    total = sum(math.prod(shape) for shape in shapes.values())

    with progress(total, "loading", " weights") as advance:

        def stacked(names, label):
            weight = stack_weight(device, [checkpoint.matrix(name) for name in names], label)
            advance(sum(math.prod(shapes[name]) for name in names))
            return weight

        def norm(name):
            return device.upload(pad_vector(checkpoint.dense(f"{name}.weight").float32()), label=name, kind="weights")

        def layer(index, spec):
            prefix, weights = f"model.layers.{index}", {}
            for group, paths in GROUPS.items():
                weights[group] = stacked([f"{prefix}.{path}.weight" for path in paths], f"layers.{index}.{group}")
            norms = {role: norm(f"{prefix}.{path}") for role, path in spec.norms.paths().items()}
            return Layer(index, spec, weights, norms)

        embedding = stacked([EMBEDDING], "embedding")
        layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
        head = embedding if config.tie_word_embeddings else stacked([checkpoint.head_name], "lm_head")
        return Model(config, embedding, layers, norm("model.norm"), head)
