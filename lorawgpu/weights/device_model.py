"""The frozen model on the GPU: embedding, layers of fused projections and norms, head."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import LayerSpec
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.rope import Heads, head_constants
from lorawgpu.ops.weight import Weight
from lorawgpu.util.progress import progress
from lorawgpu.weights.device import NOT_FINITE, Uploads, pad_vector, stack_weight
from lorawgpu.weights.tensors import (
    NORM,
    PER_LAYER_MODEL,
    PER_LAYER_NORM,
    PER_LAYER_TABLE,
    SCALAR,
    Dense,
    expected_tensors,
)


@dataclass(frozen=True)
class Widths:
    """Padded widths of a layer's activations, and where the parts of its fused projections begin.

    A part of a matrix that the checkpoint stores fused begins right after the one before it; others are padded.
    """

    hidden: int
    q: int
    kv: int
    mlp: int
    qkv: int
    gate_up: int
    k_off: int
    v_off: int
    up_off: int

    @staticmethod
    def of(spec: LayerSpec) -> "Widths":
        attention, paths = spec.attention, spec.paths
        q, kv, mlp = padded(attention.q_width), padded(attention.kv_width), padded(spec.mlp.width)
        parts = len(attention.part_widths)
        if len(paths.qkv) < parts:
            k_off, v_off, qkv = attention.q_width, attention.q_width + attention.kv_width, sum(attention.part_widths)
        else:
            k_off, v_off, qkv = q, q + (0 if attention.v_from_k else kv), q + (parts - 1) * kv
        fused = len(paths.gate_up) == 1
        up_off, gate_up = (spec.mlp.width, padded(2 * spec.mlp.width)) if fused else (mlp, 2 * mlp)
        return Widths(padded(spec.hidden), q, kv, mlp, padded(qkv), gate_up, k_off, v_off, up_off)


HEAD_NORMS = ("q", "k")  # roles of the norms that run with RoPE


def heads_of(spec: LayerSpec, eps: float) -> Heads:
    """What happens between the fused projection and attention."""
    attention, widths = spec.attention, Widths.of(spec)
    own, norm = attention.shares is None, "row" if attention.whole_norm else "head"
    return Heads(
        attention.heads,
        attention.kv_heads if own else 0,
        attention.head_dim,
        rot=attention.rope.rotary(attention.head_dim),
        k_off=widths.k_off if own else None,
        v_off=widths.v_off if own and not attention.v_from_k else None,
        norm=norm if spec.norms.q else None,
        v_norm=attention.v_norm and own,
        bias=attention.bias,
        eps=eps,
        v_scale=spec.residual_scale,
        q_table=attention.rope.query_beta != 0,
    )


@dataclass(frozen=True)
class Layer:
    """One layer: its spec, its fused projections by group (spec.GROUPS), its norms by role (spec.Norms).

    The norms of q and k, and biases, are in `constants`, as ops.rope reads them.
    """

    index: int
    spec: LayerSpec
    weights: dict[str, Weight]  # group -> [fused out, in]
    norms: dict[str, Tensor]  # role -> [padded width]
    heads: Heads
    constants: Tensor | None = None  # [heads.constant_rows, widths.qkv]; None if that is empty
    scalar: float = 1.0
    per_layer_model: Weight | None = None  # [P, C] projects the embedding to the layer's own input

    @cached_property
    def widths(self) -> Widths:
        return Widths.of(self.spec)


@dataclass(frozen=True)
class PerLayerInput:
    """What all layers share of a model's per-layer inputs.

    norm: [padded(P)]. gather(ids): the table's rows, [n, layers * P], in the stored dtype; the table stays on disk.
    """

    norm: Tensor
    dtype: str
    gather: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight  # the embedding itself when tied
    per_layer: PerLayerInput | None = None

    @property
    def hidden(self) -> int:
        """The padded width of the residual stream."""
        return padded(self.config.hidden_size)

    def matrices(self) -> dict[str, Weight]:
        """Every weight matrix by name; a tied head is the embedding and is listed once."""
        matrices = {"embedding": self.embedding}
        for layer in self.layers:
            matrices |= {f"layers.{layer.index}.{group}": w for group, w in layer.weights.items()}
            if layer.per_layer_model:
                matrices[f"layers.{layer.index}.per_layer_model"] = layer.per_layer_model
        return matrices if self.head is self.embedding else matrices | {"head": self.head}

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.matrices().values())


def load_model(device, checkpoint) -> Model:
    """Upload a checkpoint tensor by tensor, so that the host never holds more than a few."""
    with progress(_elements(checkpoint), "loading", " weights") as advance, Uploads(device, advance) as uploads:
        return _Upload(uploads, checkpoint).model()


def _elements(checkpoint) -> int:
    """The number of weights in the matrices that are uploaded, padding included."""
    shapes = expected_tensors(checkpoint.config).items()
    sizes = [map(padded, shape) for name, shape in shapes if len(shape) == 2 and not name.endswith(PER_LAYER_TABLE)]
    return sum(map(math.prod, sizes))


class _Upload:
    """Reads one tensor after another for `uploads` to put into GPU memory."""

    def __init__(self, uploads, checkpoint):
        self.uploads, self.device, self.checkpoint = uploads, uploads.device, checkpoint
        self.config, self.prefix = checkpoint.config, checkpoint.config.prefix

    def model(self) -> Model:
        config = self.config
        embedding = self.matrices([self.checkpoint.embedding_name], "embedding")
        layers = tuple(self.layer(i, spec) for i, spec in enumerate(config.layers))
        head = embedding
        if not config.tie_word_embeddings:
            head = self.matrices([self.checkpoint.head_name], "lm_head")
        norm = self.norm(self.prefix + NORM, config.logits_scale)  # scaling the head's input scales the logits
        return Model(config, embedding, layers, norm, head, self.per_layer() if config.per_layer_input else None)

    def layer(self, index: int, spec: LayerSpec) -> Layer:
        at, heads = self.config.layer_path(index), heads_of(spec, self.config.rms_norm_eps)
        weights, norms = {}, {}
        for group in spec.paths.groups():
            names = [f"{module}.weight" for module in self.config.group_modules(index, group)]
            weights[group] = self.matrices(names, f"layers.{index}.{group}")
        for role, path in spec.norms.paths().items():
            if role not in HEAD_NORMS:
                norms[role] = self.norm(f"{at}.{path}.weight")
        constants = self.constants(index, spec, heads) if heads.constant_rows else None
        scalar = float(self.checkpoint.dense(f"{at}.{SCALAR}").float32()[0]) if spec.scalar else 1.0
        per_layer = self.per_layer_model(index) if spec.per_layer_input else None
        return Layer(index, spec, weights, norms, heads, constants, scalar, per_layer)

    def matrices(self, names: list[str], label: str) -> Weight:
        """Matrices stacked by rows."""
        return stack_weight(self.uploads, [self._named(name) for name in names], label)

    def _named(self, name: str):
        """A matrix; the values of a dense one are checked as they are read."""
        matrix = self.checkpoint.matrix(name)
        return replace(matrix, where=f"{self.checkpoint.path}: {name}") if isinstance(matrix, Dense) else matrix

    def norm(self, name: str, scale: float = 1.0) -> Tensor:
        values = self.checkpoint.norm(name) * np.float32(scale)
        if not np.isfinite(values).all():
            raise UserError(f"{self.checkpoint.path}: {name}: {NOT_FINITE}")
        return self.device.upload(pad_vector(values), label=name, kind="weights")

    def constants(self, index: int, spec: LayerSpec, heads: Heads) -> Tensor:
        """Norms of q and k, and biases, in one tensor."""
        at, paths = self.config.layer_path(index), spec.norms.paths()
        norms = {role: f"{at}.{paths[role]}.weight" for role in HEAD_NORMS if role in paths}
        weights = {f"{role}_norm": self.checkpoint.norm(name) for role, name in norms.items()}
        names = [f"{module}.bias" for module in self.config.group_modules(index, "qkv")]
        bias = [self.checkpoint.dense(name).float32() for name in names] if heads.bias else None
        values = head_constants(heads, Widths.of(spec).qkv, bias=bias, **weights)
        return self.device.upload(values, label=f"layers.{index}.constants", kind="weights")

    @cached_property
    def projections(self) -> Dense:
        """The matrices of all layers that project the embedding to the layers' own inputs."""
        return self.checkpoint.dense(self.prefix + PER_LAYER_MODEL)

    def per_layer_model(self, index: int) -> Weight:
        width, stored = self.config.per_layer_input, self.projections
        rows = Dense(stored.data[index * width : (index + 1) * width], stored.dtype)
        return stack_weight(self.uploads, [rows], f"layers.{index}.per_layer_model")

    def per_layer(self) -> PerLayerInput:
        table, checkpoint = self.prefix + PER_LAYER_TABLE, self.checkpoint
        dtype = checkpoint.gather(table, np.zeros(1, np.int64)).dtype
        return PerLayerInput(
            self.norm(self.prefix + PER_LAYER_NORM), dtype, lambda ids: checkpoint.gather(table, ids).data
        )
