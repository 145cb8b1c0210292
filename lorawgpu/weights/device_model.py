"""The frozen model on the GPU: embedding, layers of fused projections and norms, head."""

from dataclasses import dataclass

from lorawgpu.families.config import ModelConfig
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.lora.layout import GROUPS
from lorawgpu.ops.weight import Weight
from lorawgpu.weights.device import pad_vector, stack_weight
from lorawgpu.weights.tensors import EMBEDDING

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}


@dataclass(frozen=True)
class Layer:
    """One block: four fused projections (see adapter_layout.GROUPS) and its norms; BitNet alone has sub-norms."""

    index: int
    qkv: Weight  # [q | k | v, C]
    o: Weight
    gate_up: Weight  # [gate | up, C]
    down: Weight
    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    attn_sub_norm: Tensor | None = None
    ffn_sub_norm: Tensor | None = None


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    embedding: Weight
    layers: tuple
    norm: Tensor
    head: Weight  # the embedding itself when tied

    @property
    def nbytes(self) -> int:
        weights = [self.embedding] + [getattr(layer, g) for layer in self.layers for g in GROUPS]
        return sum(w.nbytes for w in weights) + (0 if self.head is self.embedding else self.head.nbytes)


@dataclass(frozen=True)
class Widths:
    """Padded widths of a model's activations, and where q, k and v start in the fused projection."""

    hidden: int
    q: int
    kv: int
    mlp: int
    qkv: int
    k_off: int
    v_off: int

    @staticmethod
    def of(config: ModelConfig) -> "Widths":
        q = padded(config.num_attention_heads * config.head_dim)
        kv = padded(config.num_key_value_heads * config.head_dim)
        return Widths(padded(config.hidden_size), q, kv, padded(config.intermediate_size), q + 2 * kv, q, q + kv)


def load_model(device, checkpoint, progress=lambda name: None) -> Model:
    """Upload a checkpoint, one fused projection at a time: the host holds no more than that."""
    config = checkpoint.config

    def norm(name):
        return device.upload(pad_vector(checkpoint.dense(f"{name}.weight").float32()), label=name, kind="weights")

    def projection(layer, group):
        names = [f"model.layers.{layer}.{path}.weight" for path in GROUPS[group]]
        progress(f"layers.{layer}.{group}")
        return stack_weight(device, [checkpoint.matrix(n) for n in names], f"layers.{layer}.{group}")

    progress("embedding")
    embedding = stack_weight(device, [checkpoint.matrix(EMBEDDING)], "embedding")
    layers = tuple(
        Layer(
            i,
            *(projection(i, g) for g in GROUPS),
            **{
                field: norm(f"model.layers.{i}.{path}") for field, path in NORMS.items() if path in config.norm_shapes()
            },
        )
        for i in range(config.num_hidden_layers)
    )
    head = embedding
    if not config.tie_word_embeddings:
        head = stack_weight(device, [checkpoint.matrix(checkpoint.head_name)], "lm_head")
    return Model(config, embedding, layers, norm("model.norm"), head)
