"""The `Family` record. Each family file defines one as `FAMILY`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lorawgpu.families.bitlinear import refuse_quantized
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.keys import Keys
from lorawgpu.families.rope import Rope, read_rope, rope_settings
from lorawgpu.families.spec import AttentionSpec, LayerSpec, MlpSpec, Norms, Paths

if TYPE_CHECKING:
    from lorawgpu.families.gguf_keys import GgufKeys

PATHS = Paths()
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class GgufNames:
    """How GGUF stores a family.

    archs: values of `general.architecture`; exports write the first. layer_names: GGUF's tensor name below `blk.N.` ->
    ours below the layer's path. permuted: whether the rows of q and k are in the order of interleaved RoPE. act: the
    activation, which GGUF metadata does not name. readable: the archs that a base model can be read from. top_names:
    tensors outside of layers besides embedding, norm and head. keys: the metadata as keys of config.json, in addition
    to those that all archs have. reads: metadata keys of unusual options that `keys` understands. metadata: the inverse
    of `keys`, what an export writes in addition to what all archs have; rope_tensors: the same for tensors.
    """

    archs: tuple[str, ...]
    layer_names: Mapping[str, str]
    permuted: bool
    act: str = "silu"
    readable: tuple[str, ...] = ()
    top_names: Mapping[str, str] = field(default_factory=dict)
    keys: "Callable[[GgufKeys], dict]" = lambda meta: {}
    reads: frozenset[str] = frozenset()
    metadata: "Callable[[ModelConfig], dict]" = lambda config: {}
    rope_tensors: "Callable[[ModelConfig], dict]" = lambda config: {}


@dataclass(frozen=True)
class Family:
    """Everything specific to one family.

    architectures: `model_type` in config.json -> architecture class. defaults: by `model_type`, the defaults of
    transformers' config class for missing keys. layers: reads all layer specs from config.json. options: reads further
    fields of ModelConfig. ternary: reads where BitLinear scales come from. text: `model_type` of a multimodal config ->
    that of its `text_config`, or None if the file says. unread: keys of `text_config` that transformers' multimodal
    class ignores. norm_offset: what the model adds to the norm weights of a Hugging Face checkpoint. config_json: the
    family's own keys of the config.json that exports write for a base that came as GGUF. reads: keys that the family
    reads itself, and that would be refused otherwise.
    """

    name: str
    architectures: Mapping[str, str]
    defaults: Mapping[str, Mapping[str, object]]
    layers: Callable[[Keys], tuple[LayerSpec, ...]]
    gguf: GgufNames
    norms: Norms = Norms()
    options: Callable[[Keys], dict] = lambda keys: {}
    ternary: Callable[[Keys], str | None] = refuse_quantized
    text: Mapping[str, str | None] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    config_json: Callable[[ModelConfig], dict] | None = None
    reads: frozenset[str] = frozenset()


def equal_layers(
    count: int,
    *,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    width: int,
    act: str,
    rope: Rope,
    norms: Norms,
    paths: Paths = PATHS,
    scale: float | None = None,
    residual_scale: float = 1.0,
    **attention,
) -> tuple[LayerSpec, ...]:
    """`count` layers with the same spec. Scores are scaled by 1/sqrt(head_dim) unless `scale` is given.

    attention: further fields of AttentionSpec.
    """
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5 if scale is None else scale, rope, **attention)
    return (LayerSpec(hidden, spec, MlpSpec(width, act), norms, paths, residual_scale),) * count


def read_sizes(keys: Keys) -> dict:
    """The sizes of a layer from config.json: arguments of `equal_layers`."""
    heads = keys.integer("num_attention_heads")
    return {
        "hidden": keys.integer("hidden_size"),
        "heads": heads,
        "kv_heads": keys.integer("num_key_value_heads", default=heads),
        "head_dim": keys.head_dim(),
        "width": keys.integer("intermediate_size"),
    }


def read_equal_layers(keys: Keys, norms: Norms, **options) -> tuple[LayerSpec, ...]:
    """The layer specs of a config.json whose layers are all the same. options: arguments of `equal_layers`."""
    if "rope" not in options:
        options["rope"] = read_rope(keys)
    options = {"act": keys.activation(), "norms": norms} | options
    return equal_layers(keys.integer("num_hidden_layers"), **read_sizes(keys), **options)


def with_windows(
    layers: tuple[LayerSpec, ...], kinds: list[str], window: int | None, rope: Rope | None = None
) -> tuple[LayerSpec, ...]:
    """The layers with a sliding window, and with `rope` if given, where their kind is LOCAL."""

    def local(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, window=window, rope=rope or layer.attention.rope))

    return tuple(local(layer) if kind == LOCAL else layer for layer, kind in zip(layers, kinds, strict=True))


def window_of(config: ModelConfig) -> int | None:
    """The sliding window of the layers that have one."""
    return next((layer.attention.window for layer in config.layers if layer.attention.window is not None), None)


def read_local_rope(keys: Keys, theta: float) -> Rope:
    """The RoPE of local layers: that of nested `rope_parameters`, or else an unscaled one with `theta`."""
    if any(isinstance(value, dict) for value in (keys.data.get("rope_parameters") or {}).values()):
        return read_rope(keys, LOCAL, rope_theta=theta)
    plain = {key: value for key, value in keys.data.items() if key not in ("rope_parameters", "rope_scaling")}
    return read_rope(Keys(plain, keys.source), rope_theta=theta)


def without_rope(layer: LayerSpec) -> LayerSpec:
    """The layer without RoPE, and so without what a stretched RoPE multiplies its cosines and sines by."""
    rope = Rope(layer.attention.rope.theta, "none")
    return replace(layer, attention=replace(layer.attention, rope=rope))


def common_json(config: ModelConfig) -> dict:
    """The keys of config.json that most families share, from the first layer."""
    layer = config.layers[0]
    theta, scaling = rope_settings(layer.attention.rope, layer.attention.head_dim, config.max_position_embeddings)
    return {
        "head_dim": layer.attention.head_dim,
        "hidden_act": layer.mlp.act,
        "intermediate_size": layer.mlp.width,
        "num_attention_heads": layer.attention.heads,
        "num_key_value_heads": layer.attention.kv_heads,
        "rope_scaling": scaling,
        "rope_theta": theta,
    }
