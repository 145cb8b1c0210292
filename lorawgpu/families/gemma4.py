"""Gemma 4, text only: two head sizes, layers that share keys and values, per-layer inputs, scaled layers."""

import math
from dataclasses import replace

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import GLOBAL, LOCAL, Family, GgufNames, window_of
from lorawgpu.families.gemma import LAYER_NAMES_4, SIZES
from lorawgpu.families.gguf_keys import GgufKeys
from lorawgpu.families.keys import GELU, Keys
from lorawgpu.families.rope import read_rope
from lorawgpu.families.spec import AttentionSpec, LayerSpec, MlpSpec, Norms, Paths
from lorawgpu.files.untrusted import brief

NORMS = Norms(
    mlp_in="pre_feedforward_layernorm",
    attn_out="post_attention_layernorm",
    mlp_out="post_feedforward_layernorm",
    q="self_attn.q_norm",
    k="self_attn.k_norm",
)
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
PATTERN = 6  # every 6th layer is global
DEFAULTS = {key: value for key, value in SIZES.items() if key != "query_pre_attn_scalar"} | {
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": ROPES,
}


def read_layers(keys: Keys) -> tuple[LayerSpec, ...]:
    """The last `num_kv_shared_layers` layers read the keys and values of the last layer of their type before them."""
    count = keys.integer("num_hidden_layers")
    kinds = keys.layer_types([GLOBAL if (i + 1) % PATTERN == 0 else LOCAL for i in range(count)])
    kinds = [*kinds[:-1], GLOBAL]  # the last one always is
    own = count - keys.integer("num_kv_shared_layers", default=0, at_least=0)
    missing = set(kinds) - set(kinds[: max(own, 0)])
    if missing:
        raise UserError(
            f"{keys.source}: num_kv_shared_layers leaves no {sorted(missing)[0]} layer with keys and values of its own."
        )
    attention = {LOCAL: _local(keys), GLOBAL: _global(keys, kinds)}
    return tuple(_layer(keys, attention, kinds, index, own) for index in range(count))


def _local(keys: Keys) -> AttentionSpec:
    heads, kv_heads, head_dim = (keys.integer(k) for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return AttentionSpec(heads, kv_heads, head_dim, 1.0, read_rope(keys, LOCAL), keys.window(), v_norm=True)


def _global(keys: Keys, kinds: list[str]) -> AttentionSpec:
    heads, shared = keys.integer("num_attention_heads"), keys.flag("attention_k_eq_v")
    keys = Keys(keys.data | _global_sizes(keys, kinds), keys.source)
    kv_heads, head_dim = keys.integer("num_key_value_heads"), keys.integer("head_dim")
    return AttentionSpec(heads, kv_heads, head_dim, 1.0, read_rope(keys, GLOBAL), v_norm=True, v_from_k=shared)


def _global_sizes(keys: Keys, kinds: list[str]) -> dict:
    """What replaces `head_dim` and `num_key_value_heads` in global layers.

    Published files have keys of their own for it; transformers 5 saves `per_layer_config`: index -> the layer's sizes,
    where an index may have leading zeros.
    """
    given = keys.data.get("per_layer_config")
    if given is None:
        heads = keys.data.get("num_global_key_value_heads") if keys.flag("attention_k_eq_v") else None
        return {"head_dim": keys.integer("global_head_dim")} | ({} if heads is None else {"num_key_value_heads": heads})
    by_layer = {key.lstrip("0") or "0": sizes for key, sizes in given.items()} if isinstance(given, dict) else {}
    sizes = by_layer.get(str(len(kinds) - 1), {})  # the last layer is global
    wanted = {str(i): sizes for i, kind in enumerate(kinds) if kind == GLOBAL} if sizes else {}
    good = isinstance(given, dict) and isinstance(sizes, dict) and by_layer == wanted
    if not good or set(sizes) - {"head_dim", "num_key_value_heads"}:
        raise UserError(
            f"{keys.source}: per_layer_config is {brief(given)}; wanted the same head_dim and num_key_value_heads for "
            "all full_attention layers, and none for others."
        )
    return sizes


def _layer(keys: Keys, attention: dict, kinds: list[str], index: int, own: int) -> LayerSpec:
    spec, norms, width = attention[kinds[index]], NORMS, keys.integer("intermediate_size")
    per_layer = keys.integer("hidden_size_per_layer_input", at_least=0)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if spec.v_from_k:
        qkv = qkv[:2]
    if index >= own:
        producer = max(i for i in range(own) if kinds[i] == kinds[index])
        spec, norms, qkv = replace(spec, shares=producer, v_from_k=False), replace(norms, k=None), qkv[:1]
        width *= 2 if keys.flag("use_double_wide_mlp") else 1
    paths = Paths(qkv=qkv)
    if per_layer:
        norms = replace(norms, ple_out="post_per_layer_input_norm")
        paths = replace(paths, ple_gate=("per_layer_input_gate",), ple_proj=("per_layer_projection",))
    mlp = MlpSpec(width, keys.activation("hidden_activation", GELU))
    hidden = keys.integer("hidden_size")
    return LayerSpec(hidden, spec, mlp, norms, paths, per_layer_input=per_layer, scalar=True)


def read_options(keys: Keys) -> dict:
    bidirectional = keys.data.get("use_bidirectional_attention")
    if bidirectional not in (None, "vision", False):
        raise UserError(
            f"{keys.source}: use_bidirectional_attention {bidirectional!r} is not supported; wanted vision."
        )
    return {
        "embed_scale": math.sqrt(keys.integer("hidden_size")),
        "final_softcap": keys.optional("final_logit_softcapping"),
        "per_layer_vocab": keys.integer("vocab_size_per_layer_input"),
    }


def read_gguf(meta: GgufKeys) -> dict:
    count = meta.integer("block_count")
    flags = meta.flags("attention.sliding_window_pattern")
    flags = [(i + 1) % PATTERN != 0 for i in range(count)] if flags is None else flags
    kv_heads, widths = meta.per_layer("attention.head_count_kv"), meta.per_layer("feed_forward_length")
    first = {flag: flags.index(flag) if flag in flags else 0 for flag in (True, False)}
    shared = meta.get("attention.shared_kv_layers") or 0
    rotary = _rotating(meta) if meta.has("rope_freqs.weight") else None
    head_dim = meta.integer("attention.key_length")
    partial = 2 * rotary / head_dim if rotary is not None else 0.25
    return {
        "layer_types": [LOCAL if flag else GLOBAL for flag in flags],
        "head_dim": meta.integer("attention.key_length_swa", head_dim),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[first[True]],
        "num_global_key_value_heads": kv_heads[first[False]],
        "attention_k_eq_v": not meta.has(f"blk.{first[False]}.attn_v.weight"),
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "sliding_window": meta.integer("attention.sliding_window"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": meta.file.tensors["token_embd.weight"].shape[0],
        "rope_parameters": {
            LOCAL: ROPES[LOCAL] | {"rope_theta": meta.number("rope.freq_base_swa", 10000.0)},
            GLOBAL: ROPES[GLOBAL]
            | {"rope_theta": meta.number("rope.freq_base", 1000000.0), "partial_rotary_factor": partial},
        },
        "multimodal": True,
    }


def write_gguf(config: ModelConfig) -> dict:
    layers = config.layers
    local = next((layer for layer in layers if layer.attention.window is not None), layers[0]).attention
    whole = layers[-1].attention  # the last layer is always global
    return {
        "attention.head_count_kv": [layer.attention.kv_heads for layer in layers],
        "feed_forward_length": [layer.mlp.width for layer in layers],
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": local.head_dim,
        "attention.value_length_swa": local.head_dim,
        "attention.sliding_window": window_of(config),
        "attention.sliding_window_pattern": [layer.attention.window is not None for layer in layers],
        "attention.shared_kv_layers": sum(layer.attention.shares is not None for layer in layers),
        "final_logit_softcapping": config.final_softcap,
        "embedding_length_per_layer_input": config.per_layer_input,
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": local.head_dim,
        "rope.freq_base": whole.rope.theta,
        "rope.freq_base_swa": local.rope.theta,
    }


def rope_tensors(config: ModelConfig) -> dict:
    """1 for the pairs of global layers that rotate, 1e30 for the others."""
    attention = config.layers[-1].attention
    rotates = attention.rope.inv_freq(attention.head_dim) > 0
    return {"rope_freqs.weight": [1.0 if turns else 1e30 for turns in rotates]}


def _rotating(meta: GgufKeys) -> int:
    """The number of pairs that rotate in global layers: GGUF stores 1 for them and 1e30 for the others."""
    return sum(value < 1e20 for value in meta.vector("rope_freqs.weight"))


def config_json(config: ModelConfig) -> dict:
    raise UserError(
        "a Gemma 4 base that came as GGUF cannot be written as a Hugging Face folder, which has towers for images "
        "and sound; use the model's Hugging Face folder as the base instead"
    )


FAMILY = Family(
    name="gemma4",
    architectures={
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_text": "Gemma4ForCausalLM",
        "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    },
    defaults={
        "gemma4_text": DEFAULTS,
        "gemma4_unified_text": DEFAULTS
        | {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144},
    },
    norms=NORMS,
    layers=read_layers,
    options=read_options,
    text={"gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"},
    gguf=GgufNames(
        archs=("gemma4",),
        readable=("gemma4",),
        layer_names=LAYER_NAMES_4
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale": "layer_scalar",
        },
        permuted=False,
        act="gelu_tanh",
        top_names={
            "per_layer_token_embd": "embed_tokens_per_layer",
            "per_layer_model_proj": "per_layer_model_projection",
            "per_layer_proj_norm": "per_layer_projection_norm",
        },
        keys=read_gguf,
        metadata=write_gguf,
        rope_tensors=rope_tensors,
        reads=frozenset(
            {
                "attention.sliding_window",
                "attention.sliding_window_pattern",
                "attention.head_count_kv",
                "attention.value_length",
                "feed_forward_length",
                "final_logit_softcapping",
                "rope.dimension_count",
                "rope_freqs",
            }
        ),
    ),
    config_json=config_json,
    reads=frozenset(
        {
            "sliding_window",
            "layer_types",
            "final_logit_softcapping",
            "use_bidirectional_attention",
            "per_layer_config",
            "partial_rotary_factor",
        }
    ),
)
