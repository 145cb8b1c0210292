"""A model's config: its sizes, its layers, and where its ternary scales come from.

`families.hf` reads it from a `config.json`, `families.gguf` from GGUF metadata.
"""

import math
from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.families.keys import SIZE_LIMITS
from lorawgpu.families.modules import PER_LAYER_MODULES
from lorawgpu.families.spec import LayerSpec


@dataclass(frozen=True)
class ModelConfig:
    """The config of one decoder, with Hugging Face's names.

    `ternary`: how the file gives a BitLinear's scale `w`: `multiply` (w = weight_scale), `divide`
    (w = 1 / weight_scale), `online` (w = mean|W| of master weights), or None for a dense model.
    """

    family: str  # a name of families.registry
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    ternary: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    layers: tuple[LayerSpec, ...]
    embed_scale: float = 1.0
    logits_scale: float = 1.0  # multiplies the logits
    final_softcap: float | None = None  # then z becomes cap * tanh(z / cap)
    prefix: str = "model."  # of all module paths but lm_head's
    per_layer_vocab: int = 0  # rows of the table of per-layer inputs

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def per_layer_input(self) -> int:
        """Width of a layer's own embedding of each token; 0: the model has none."""
        return self.layers[0].per_layer_input

    @property
    def longest_short(self) -> int | None:
        """The longest sequence with the short frequencies of longrope, or None if the model has one set of them."""
        ropes = (layer.attention.rope for layer in self.layers)
        return next((rope.original_max_position_embeddings for rope in ropes if rope.switches), None)

    def layer_path(self, index: int) -> str:
        """The module path of a layer."""
        return f"{self.prefix}layers.{index}"

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of every linear layer that an adapter can target, by module path, in forward order."""
        return {
            f"{self.layer_path(n)}.{path}": shape
            for n, layer in enumerate(self.layers)
            for path, shape in layer.linear_shapes().items()
        }

    def all_linear(self) -> tuple[str, ...]:
        """The names of the linear layers of attention and MLP: PEFT's `all-linear`."""
        names = dict.fromkeys(path.rsplit(".", 1)[1] for path in self.linear_shapes())
        return tuple(name for name in names if name not in PER_LAYER_MODULES)

    def group_modules(self, layer: int, group: str) -> list[str]:
        """The module paths of the linear layers of a group (spec.GROUPS) of a layer; none if it lacks the group."""
        return [f"{self.layer_path(layer)}.{path}" for path in getattr(self.layers[layer].paths, group)]


def check_sizes(config: ModelConfig, source: str) -> None:
    """Raise UserError, naming the key, unless the kernels can run a model of these sizes."""
    if not 0 < config.rms_norm_eps < 1:
        raise UserError(f"{source}: rms_norm_eps is {config.rms_norm_eps!r}; wanted a number between 0 and 1.")
    ids = {"bos_token_id": (config.bos_token_id,), "eos_token_id": config.eos_token_ids}
    for key, values in ids.items():
        for value in values:
            if value is not None and not 0 <= value < config.vocab_size:
                raise UserError(f"{source}: {key} {value} is outside the vocabulary of {config.vocab_size}.")
    _check_limits(source, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
                  num_hidden_layers=config.num_hidden_layers,
                  max_position_embeddings=config.max_position_embeddings)  # fmt: skip
    for layer in dict.fromkeys(config.layers):
        _check_layer(layer, source)


def _check_layer(layer: LayerSpec, source: str) -> None:
    attention, rope = layer.attention, layer.attention.rope
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    _check_limits(source, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
                  intermediate_size=layer.mlp.width)  # fmt: skip
    if heads % kv_heads:
        raise UserError(f"{source}: num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}.")
    if head_dim % 2:
        raise UserError(f"{source}: head_dim is {head_dim}; wanted an even number, because RoPE rotates pairs.")
    pairs = rope.rotary(head_dim) // 2
    if rope.freq_factors is not None and len(rope.freq_factors) != pairs:
        raise UserError(f"{source}: {len(rope.freq_factors)} RoPE frequency factors; head_dim wants {pairs}.")
    if not 1 <= rope.theta < math.inf:
        raise UserError(f"{source}: rope_theta is {rope.theta!r}; wanted a finite number of at least 1.")


def _check_limits(source: str, **sizes: int) -> None:
    for key, value in sizes.items():
        if type(value) is not int or not 1 <= value <= SIZE_LIMITS[key]:
            raise UserError(f"{source}: {key} is {value!r}; wanted a whole number from 1 to {SIZE_LIMITS[key]}.")
