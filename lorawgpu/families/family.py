"""The `Family` record. Each family file defines one as `FAMILY`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.keys import Keys
from lorawgpu.families.rope import Rope, read_rope
from lorawgpu.families.spec import AttentionSpec, LayerSpec, MlpSpec, Norms


@dataclass(frozen=True)
class GgufNames:
    """How GGUF stores a family.

    archs: values of `general.architecture`; exports write the first. layer_names: GGUF's tensor name below `blk.N.` ->
    ours below `model.layers.N.`. permuted: whether the rows of q and k are in the order of interleaved RoPE. act: the
    activation, which GGUF metadata does not name. readable: whether a base model can be read from GGUF.
    """

    archs: tuple[str, ...]
    layer_names: Mapping[str, str]
    permuted: bool
    act: str
    readable: bool = True


@dataclass(frozen=True)
class Family:
    """Everything specific to one family.

    architectures: `model_type` in config.json -> architecture class. defaults: by `model_type`, the defaults of
    transformers' config class for missing keys. norms: those of every layer. layers: reads all layer specs from
    config.json. ternary: reads where BitLinear scales come from; None for a dense model. config_json: the family's own
    keys of the config.json that exports write for a base that came as GGUF. reads: keys that the family reads itself,
    and that would be refused otherwise.
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
    """`count` layers with the same spec, with scores scaled by 1/sqrt(head_dim)."""
    attention = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, rope)
    return (LayerSpec(hidden, attention, MlpSpec(width, act), norms),) * count


def read_equal_layers(keys: Keys, norms: Norms) -> tuple[LayerSpec, ...]:
    """The layer specs of a config.json whose layers are all the same."""
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
