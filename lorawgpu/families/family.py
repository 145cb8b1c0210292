"""The record that says what a family is; one constant of it in each of the family files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.keys import Keys
from lorawgpu.families.rope import Rope, read_rope
from lorawgpu.families.spec import AttentionSpec, LayerSpec, MlpSpec, Norms


@dataclass(frozen=True)
class GgufNames:
    """How a family is written in GGUF.

    archs: values of `general.architecture`, the one to write first. layer_names: GGUF's name of a tensor below
    `blk.N.` -> ours below `model.layers.N.`. permuted: whether q and k have their rows in the order of interleaved
    RoPE. act: the activation, which the metadata does not name. readable: whether a base model can be read from GGUF.
    """

    archs: tuple[str, ...]
    layer_names: Mapping[str, str]
    permuted: bool
    act: str
    readable: bool = True


@dataclass(frozen=True)
class Family:
    """Everything that only this family knows.

    architectures: `model_type` of a config.json -> its class. defaults: by `model_type`, the values that transformers'
    config class has for a missing key. norms: those of every layer. layers: reads the specs of all layers. ternary:
    reads where BitLinear scales come from, None for a dense model. config_json: the family's own keys of a
    config.json, for a base that came as GGUF. reads: keys that would be refused if the family did not read them.
    """

    name: str
    architectures: Mapping[str, str]
    defaults: Mapping[str, Mapping[str, object]]
    norms: Norms
    layers: Callable[[Keys], tuple[LayerSpec, ...]]
    ternary: Callable[[Keys], str | None]
    gguf: GgufNames
    config_json: Callable[[ModelConfig], dict] | None = None
    reads: frozenset[str] = field(default_factory=frozenset)


def equal_layers(
    count: int, *, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, act: str, rope: Rope, norms: Norms
) -> tuple[LayerSpec, ...]:
    """`count` layers of one spec, with scores scaled by 1/sqrt(head_dim)."""
    attention = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    return (LayerSpec(hidden, attention, MlpSpec(width, act), norms),) * count


def read_equal_layers(keys: Keys, norms: Norms) -> tuple[LayerSpec, ...]:
    """The layers of a config.json whose layers are all alike."""
    heads = keys.integer("num_attention_heads")
    return equal_layers(
        keys.integer("num_hidden_layers"),
        hidden=keys.integer("hidden_size"),
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", default=heads),
        head_dim=keys.head_dim(),
        width=keys.integer("intermediate_size"),
        act=keys.activation(),
        rope=read_rope(keys),
        norms=norms,
    )
