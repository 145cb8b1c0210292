"""Model config: both forms of RoPE settings, BitNet's three formats; everything else is refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorawgpu.errors import UserError
from lorawgpu.families.hf import from_hf
from lorawgpu.families.spec import Norms
from lorawgpu.ops.gate import ACTIVATIONS

GOLDEN = Path(__file__).parent / "golden"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def llama(**changes):
    """The dense golden config with changes; a change to `...` removes the key."""
    data = json.loads((GOLDEN / "llama_dense" / "config.json").read_text()) | changes
    return {key: value for key, value in data.items() if value is not ...}


def bitnet(**quantization):
    data = json.loads((GOLDEN / "bitnet_packed" / "config.json").read_text())
    return data | {"quantization_config": {"quant_method": "bitnet", **quantization}}


def mistral(**changes):
    return llama(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None, **changes)


def rope_of(data):
    return from_hf(data).layers[0].attention.rope


def refusal(data):
    with pytest.raises(UserError) as caught:
        from_hf(data, "config.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "family", "ternary", "act", "tied", "heads"),
    [
        ("bitnet_master", "bitnet", "online", "relu2", True, (4, 2, 8)),
        ("bitnet_packed", "bitnet", "multiply", "relu2", True, (4, 2, 8)),
        ("bitnet_q_only", "bitnet", "multiply", "relu2", True, (4, 1, 8)),
        ("llama_bitlinear", "llama", "divide", "silu", False, (4, 2, 8)),
        ("llama_dense", "llama", None, "silu", True, (4, 2, 16)),
    ],
)
def test_golden_configs(case, family, ternary, act, tied, heads):
    config = from_hf(json.loads((GOLDEN / case / "config.json").read_text()))
    (layer,) = set(config.layers)
    attention = layer.attention
    assert (config.family, config.ternary, layer.mlp.act, config.tie_word_embeddings) == (family, ternary, act, tied)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == heads
    assert bool(layer.norms.attn_sub and layer.norms.mlp_sub) == (family == "bitnet")
    assert attention.scale == pytest.approx(1 / math.sqrt(heads[2]), rel=1e-15)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)


def test_rope_spellings_agree():
    old = from_hf(llama(rope_theta=5e5, rope_scaling=LLAMA3))
    new = from_hf(llama(rope_theta=..., rope_parameters={"rope_theta": 5e5, **LLAMA3}))
    older = {"type": "llama3"} | {key: value for key, value in LLAMA3.items() if key != "rope_type"}
    assert old == new == from_hf(llama(rope_theta=5e5, rope_scaling=older))
    assert from_hf(llama(rope_theta=5e5)) == from_hf(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))


def test_rope_default_theta_is_the_class_default():
    assert rope_of(llama(rope_theta=...)).theta == 1e4
    data = bitnet(linear_class="autobitlinear")
    del data["rope_theta"]
    assert rope_of(data).theta == 5e5


def test_rope_frequencies():
    rope = rope_of(llama(rope_theta=10000.0))
    assert rope.inv_freq(4).tolist() == [1.0, 0.01]
    assert rope.inv_freq(16).dtype == np.float64


def test_llama3_rope_equals_the_published_rule():
    """Computed pair by pair as in the Llama 3.1 release; float64 on both sides, so only rounding may differ."""
    rope = rope_of(llama(rope_theta=5e5, rope_scaling=LLAMA3))
    kinds = set()
    for i, ours in enumerate(rope.inv_freq(128)):
        plain = 5e5 ** (-2 * i / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            wanted, kind = plain, "kept"
        elif wavelength > 8192 / 1:
            wanted, kind = plain / 8, "stretched"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted, kind = (1 - smooth) * plain / 8 + smooth * plain, "blended"
        kinds.add(kind)
        assert ours == pytest.approx(wanted, rel=1e-12)
    assert kinds == {"kept", "stretched", "blended"}


@pytest.mark.parametrize(
    ("settings_", "wanted"),
    [
        ({}, "divide"),
        ({"linear_class": "bitlinear"}, "divide"),
        ({"linear_class": "bitlinear", "quantization_mode": "offline"}, "divide"),
        ({"linear_class": "autobitlinear"}, "multiply"),
        ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, "multiply"),
        ({"linear_class": "autobitlinear", "quantization_mode": "online"}, "online"),
        ({"modules_to_not_convert": ["lm_head"]}, "divide"),
    ],
)
def test_where_the_scale_comes_from(settings_, wanted):
    assert from_hf(bitnet(**settings_)).ternary == wanted


def test_defaults_of_missing_keys():
    config = from_hf(llama(head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., pad_token_id=...,
                           eos_token_id=[2, 3], rms_norm_eps=...))  # fmt: skip
    attention = config.layers[0].attention
    assert (attention.head_dim, attention.kv_heads, config.tie_word_embeddings) == (16, 4, False)
    assert (config.eos_token_ids, config.pad_token_id, config.rms_norm_eps) == ((2, 3), None, 1e-6)


def test_head_dim_need_not_divide_the_width():
    shapes = from_hf(llama(head_dim=10)).layers[0].linear_shapes()
    assert shapes["self_attn.q_proj"] == (40, 64)
    assert shapes["self_attn.k_proj"] == (20, 64)
    assert shapes["self_attn.o_proj"] == (64, 40)


def test_the_window_of_mistral():
    assert window_of(mistral()) is None
    assert window_of(mistral() | {"sliding_window": 128}) == 128
    no_key = mistral()
    del no_key["sliding_window"]
    assert window_of(no_key) == 4096  # transformers' class default


def window_of(data):
    return from_hf(data).layers[0].attention.window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' (a mixture of experts)"),
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "qwen3_5_text"}, "gated delta nets"),
        ({"model_type": "falcon_mamba"}, "Mamba layers"),
        ({"model_type": "gemma3_text"}, "gemma3_text"),
        ({"model_type": ...}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"qk_norm": True}, "qk_norm"),
        ({"use_qk_norm": True}, "qk_norm"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "attn_softcap"),
        ({"final_logit_softcapping": 30.0}, "logit_softcap"),
        ({"post_norms": True}, "post_norms"),
        ({"norm_offset": 1}, "norm_offset"),
        ({"embedding_multiplier": 12.0}, "embed_scale"),
        ({"attention_multiplier": 0.1}, "attn_scale"),
        ({"num_local_experts": 8}, "experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"is_causal": False}, "is_causal (bidirectional attention)"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config (sizes by layer)"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 is not below"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"head_dim": ..., "hidden_size": 66}, "head_dim is missing"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"bos_token_id": 320}, "bos_token_id 320"),
        ({"eos_token_id": [2, "</s>"]}, "eos_token_id"),
    ],
)
def test_refused_by_name(changes, named):
    message = refusal(llama(**changes))
    assert named in message
    assert message.startswith("config.json")


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({"linear_class": "tiledlinear"}, "tiledlinear"),
        ({"quantization_mode": "sometimes"}, "sometimes"),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, "autobitlinear"),
        ({"modules_to_not_convert": ["lm_head", "q_proj"]}, "q_proj"),
    ],
)
def test_quantization_refused_by_name(settings_, named):
    assert named in refusal(bitnet(**settings_))


def test_bitnet_without_quantization_config_is_refused():
    data = bitnet()
    del data["quantization_config"]
    assert "quantization_config" in refusal(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_value_under_any_key_is_read_or_refused(data):
    config = bitnet(linear_class="autobitlinear")
    config["rope_scaling"] = dict(LLAMA3)
    where = data.draw(st.sampled_from([config, config["rope_scaling"], config["quantization_config"]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(JSON)
    try:
        from_hf(config)
    except UserError as error:
        assert "config.json" in str(error)


def test_norms_of_q_and_k_come_together():
    (layer,) = set(from_hf(llama()).layers)
    with pytest.raises(ValueError, match="norms of both q and k"):
        replace(layer, norms=Norms(q="self_attn.q_norm"))


@pytest.mark.parametrize("name", ["silu", "swish", "relu2"])
def test_activations_have_kernels(name):
    assert from_hf(llama(hidden_act=name)).layers[0].mlp.act in ACTIVATIONS


def family(model_type, architecture, **changes):
    """The config of a small model of another family."""
    config = llama(model_type=model_type, architectures=[architecture], **changes)
    return {key: value for key, value in config.items() if key not in ("rope_scaling", "hidden_act")}


GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32, "attention_k_eq_v": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (family("qwen3", "Qwen3ForCausalLM", attention_bias=True), "attention_bias (qkv_bias)"),
        (family("smollm3", "SmolLM3ForCausalLM", mlp_bias=True), "mlp_bias"),
        (family("granite", "GraniteForCausalLM", attention_bias=True), "attention_bias (qkv_bias)"),
        (family("olmo2", "Olmo2ForCausalLM", attention_bias=True), "attention_bias (qkv_bias)"),
        (family("gemma2", "Gemma2ForCausalLM", use_bidirectional_attention=True), "bidirectional attention"),
        (family("gemma3_text", "Gemma3ForCausalLM", use_bidirectional_attention=True), "bidirectional attention"),
        (family("gemma4_text", "Gemma4ForCausalLM", use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (family("gemma4_text", "Gemma4ForCausalLM", enable_moe_block=True), "mixture of experts"),
        (family("granitemoehybrid", "GraniteMoeHybridForCausalLM", num_local_experts=4), "mixture of experts"),
        (family("granitemoehybrid", "GraniteMoeHybridForCausalLM"), "mixture of experts"),  # transformers' default
        (
            family("granitemoehybrid", "GraniteMoeHybridForCausalLM", num_local_experts=0,
                   layer_types=["mamba", "attention"]),
            "no Mamba layers",
        ),
        (family("qwen2", "Qwen2ForCausalLM", layer_types=["linear_attention", "full_attention"]), "layer_types"),
        (family("qwen3", "Qwen3ForCausalLM", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (family("gemma4_text", "Gemma4ForCausalLM", per_layer_config={"0": {"head_dim": 8}}), "per_layer_config"),
    ],
)  # fmt: skip
def test_what_no_kernel_computes_is_refused_by_name(config, named):
    assert named in refusal(config)


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 32, "num_key_value_heads": 1}])
def test_gemma4_sizes_as_transformers_5_saves_them(sizes):
    def spec(**changes):
        config = family("gemma4_text", "Gemma4ForCausalLM", **(GEMMA4 | changes))
        return from_hf(config).layers[1].attention

    published = spec(global_head_dim=sizes.get("head_dim", 16),
                     num_global_key_value_heads=sizes.get("num_key_value_heads"))  # fmt: skip
    assert spec(global_head_dim=999, per_layer_config={"01": sizes} if sizes else {}) == published


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, True), (None, False, False), (True, False, True), (False, True, False), (False, None, False)],
)
def test_the_outer_config_says_whether_a_multimodal_head_is_tied(outer, inner, tied):
    text = llama(model_type="ministral3") | {"tie_word_embeddings": inner}
    config = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert from_hf(config | {"tie_word_embeddings": outer}).tie_word_embeddings == tied


def test_a_stretched_rope_leaves_layers_without_rope_alone():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = family("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0]) | {"rope_scaling": yarn}
    assert [layer.attention.rope.attention_factor > 1 for layer in from_hf(config).layers] == [True, False]


def test_rope_scaling_wins_over_rope_parameters():
    """As in transformers; a Ministral 3 without rope_parameters has those of its config class."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 8}
    config = family("ministral3", "Ministral3ForCausalLM")
    assert from_hf(config).layers[0].attention.rope.query_beta == 0.1
    found = from_hf(config | {"rope_scaling": rope}).layers[0].attention.rope
    assert (found.theta, found.factor, found.query_beta) == (500.0, 2.0, 0.0)
    outer = from_hf(config | {"rope_scaling": rope, "original_max_position_embeddings": 4})
    assert outer.layers[0].attention.rope.original_max_position_embeddings == 4
