"""The frozen model on the GPU: embedding, layers of fused projections and norms, head."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import LayerSpec
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.rope import Heads, head_constants
from lorawgpu.ops.weight import Weight
from lorawgpu.weights.device import pad_vector, stack_weight
from lorawgpu.weights.tensors import NORM, PER_LAYER_MODEL, PER_LAYER_NORM, PER_LAYER_TABLE, SCALAR, Dense


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


def load_model(device, checkpoint, progress=lambda name: None) -> Model:
    """Upload a checkpoint one fused projection at a time, so that the host never holds more than that."""
    config, prefix = checkpoint.config, checkpoint.config.prefix

    def vector(values, name):
        return device.upload(pad_vector(values), label=name, kind="weights")

    def norm(name, scale=1.0):
        return vector(checkpoint.norm(name) * np.float32(scale), name)

    def projection(layer, group):
        progress(f"layers.{layer}.{group}")
        names = [f"{module}.weight" for module in config.group_modules(layer, group)]
        return stack_weight(device, [checkpoint.matrix(n) for n in names], f"layers.{layer}.{group}")

    def constants(layer, spec, heads):
        if not heads.constant_rows:
            return None
        at, paths = config.layer_path(layer), spec.norms.paths()
        weights = {
            f"{role}_norm": checkpoint.norm(f"{at}.{paths[role]}.weight") for role in HEAD_NORMS if role in paths
        }
        names = [f"{module}.bias" for module in config.group_modules(layer, "qkv")]
        bias = [checkpoint.dense(name).float32() for name in names] if heads.bias else None
        values = head_constants(heads, Widths.of(spec).qkv, bias=bias, **weights)
        return device.upload(values, label=f"layers.{layer}.constants", kind="weights")

    def layer(index, spec):
        at, heads = config.layer_path(index), heads_of(spec, config.rms_norm_eps)
        paths = {role: path for role, path in spec.norms.paths().items() if role not in HEAD_NORMS}
        return Layer(
            index,
            spec,
            {group: projection(index, group) for group in spec.paths.groups()},
            {role: norm(f"{at}.{path}.weight") for role, path in paths.items()},
            heads,
            constants(index, spec, heads),
            float(checkpoint.dense(f"{at}.{SCALAR}").float32()[0]) if spec.scalar else 1.0,
            per_layer_model(index),
        )

    def per_layer_model(index):
        if not (width := config.per_layer_input):
            return None
        rows = projections.data[index * width : (index + 1) * width]
        return stack_weight(device, [Dense(rows, projections.dtype)], f"layers.{index}.per_layer_model")

    def per_layer():
        table = prefix + PER_LAYER_TABLE
        dtype = checkpoint.gather(table, np.zeros(1, np.int64)).dtype
        return PerLayerInput(norm(prefix + PER_LAYER_NORM), dtype, lambda ids: checkpoint.gather(table, ids).data)

    progress("embedding")
    embedding = stack_weight(device, [checkpoint.matrix(checkpoint.embedding_name)], "embedding")
    projections = checkpoint.dense(prefix + PER_LAYER_MODEL) if config.per_layer_input else None
    layers = tuple(layer(i, spec) for i, spec in enumerate(config.layers))
    head = embedding
    if not config.tie_word_embeddings:
        head = stack_weight(device, [checkpoint.matrix(checkpoint.head_name)], "lm_head")
    last = norm(prefix + NORM, config.logits_scale)  # scaling the head's input scales the logits
    return Model(config, embedding, layers, last, head, per_layer() if config.per_layer_input else None)
