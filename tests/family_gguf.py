"""A golden case's weights as a float32 GGUF file, with the names and in the forms of llama.cpp's converters."""

import json
import math

import gguf
import numpy as np

from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.safetensors import SafetensorsFile

COMMON = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = COMMON | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NAMES = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA
    | {
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    },
    "phi3": COMMON | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "olmo2": COMMON
    | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
}
TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
# What Gemma 3's published text_config leaves out.
GEMMA3_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072, "bos_token_id": 2,
                   "query_pre_attn_scalar": 256, "sliding_window_pattern": 6}  # fmt: skip
PERMUTED = ("llama", "smollm3", "granite", "mistral3")


def write_case(folder, path, arch, edit=lambda writer: None, tokenizer=False):
    """Write the case in `folder` as a GGUF file of architecture `arch`, after `edit(writer)`. Returns the path.

    tokenizer: with a tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    text = (GEMMA3_DEFAULTS if arch == "gemma3" else {}) | config.get("text_config", config)
    writer = gguf.GGUFWriter(path, arch)
    METADATA.get(arch, lambda writer, text: None)(writer, text)
    _common(writer, text, config)
    if tokenizer:
        add_tokenizer(writer, text["vocab_size"])
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    for name, values in _tensors(folder, tied).items():
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        for gguf_name, part in converted(name, values, arch, text):
            writer.add_tensor(gguf_name, np.ascontiguousarray(part))
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(folder, tied):
    """The text model's tensors as float32, named from the model on: "layers.0.mlp.up_proj.weight", "lm_head.weight"."""
    file, found = SafetensorsFile(folder / "model.safetensors"), {}
    for name, entry in file.entries.items():
        if name.startswith(("model.language_model.", "language_model.", "lm_head.")) or not _multimodal(file):
            short = name.removeprefix("language_model.").removeprefix("model.").removeprefix("language_model.")
            found[short] = widen(file.read(name), DENSE_TYPES[entry.dtype])
    if tied:
        found.pop("lm_head.weight", None)
    return found


def _multimodal(file):
    return any("language_model." in name for name in file.entries)


def _name(name, arch):
    if name == "lm_head.weight":
        return "output.weight"
    if not name.startswith("layers."):
        return TOP[name]
    _, layer, path = name.split(".", 2)
    module, kind = (path, "weight") if path == "layer_scalar" else path.rsplit(".", 1)
    return f"blk.{layer}.{NAMES.get(arch, COMMON)[module]}.{kind}"


def converted(name, values, arch, text):
    """GGUF's names and values for the weight `name`, or for a change of it. Only granite's file splits one in two."""
    name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    if "shared_mlp.input_linear" in name:
        names = [name.replace("shared_mlp.input_linear", f"mlp.{part}_proj") for part in ("gate", "up")]
        return [(_name(part, arch), half) for part, half in zip(names, np.split(values, 2), strict=True)]
    return [(_name(name, arch), _permuted(name, values, arch, text))]


def _permuted(name, values, arch, text):
    heads = {"q_proj": text["num_attention_heads"], "k_proj": text.get("num_key_value_heads")}
    module = name.split(".")[-2] if "." in name else name
    if arch in PERMUTED and module in heads:
        rows = len(values)
        return values.reshape(heads[module], 2, rows // heads[module] // 2, -1).swapaxes(1, 2).reshape(values.shape)
    return values


def _common(writer, text, config):
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    gemma4 = "global_head_dim" in text
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if not gemma4:
        head_dim = text.get("head_dim", hidden // heads)
        writer.add_feed_forward_length(text["intermediate_size"])
        writer.add_head_count_kv(text["num_key_value_heads"])
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        writer.add_rope_freq_base(rope.get("rope_theta", text.get("rope_theta")))
        _stretching(writer, rope)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    ends = config.get("eos_token_id", text.get("eos_token_id"))
    scaling = text.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    writer.add_bos_token_id(text["bos_token_id"])
    writer.add_eos_token_id(ends if isinstance(ends, int) else ends[0])
    if not isinstance(ends, int):
        writer.add_eot_token_id(ends[1])


def _stretching(writer, rope):
    """YaRN and linear scaling. Converters of OLMo 3 and Phi-3 write theirs on their own."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in ("yarn", "linear"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _mistral3(writer, text):
    rope = text["rope_parameters"]
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def add_tokenizer(writer, size):
    """Byte-level BPE with as many letters as fit, and one merge."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(i) for i in visible] + [chr(256 + i) for i in range(256 - len(visible))]
    tokens = [*["<unk>", "<s>", "</s>", *letters][: size - 1], "ab"]
    tokens += [f"<extra_{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (size - 3))
    writer.add_token_merges(["a b"])


def _gemma2(writer, text):
    writer.add_attention_scale(text["query_pre_attn_scalar"] ** -0.5)  # converters leave it out: published ones follow
    writer.add_sliding_window(text["sliding_window"])
    writer.add_attn_logit_softcapping(text["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(text["final_logit_softcapping"])


def _gemma3(writer, text):
    writer.add_attention_scale(text["query_pre_attn_scalar"] ** -0.5)
    writer.add_sliding_window(text["sliding_window"])
    writer.add_sliding_window_pattern(text["sliding_window_pattern"])


def _gemma4(writer, text):
    count, local = text["num_hidden_layers"], [kind == "sliding_attention" for kind in text["layer_types"]]
    shared, wide = text["num_kv_shared_layers"], text["use_double_wide_mlp"]
    global_kv = text["num_global_key_value_heads"] or text["num_key_value_heads"]
    writer.add_head_count_kv([text["num_key_value_heads"] if flag else global_kv for flag in local])
    width = text["intermediate_size"]
    writer.add_feed_forward_length([width * (2 if wide and i >= count - shared else 1) for i in range(count)])
    writer.add_key_length(text["global_head_dim"])
    writer.add_value_length(text["global_head_dim"])
    writer.add_key_length_swa(text["head_dim"])
    writer.add_value_length_swa(text["head_dim"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_sliding_window_pattern(local)
    writer.add_shared_kv_layers(shared)
    writer.add_final_logit_softcapping(text["final_logit_softcapping"])
    writer.add_embedding_length_per_layer_input(text["hidden_size_per_layer_input"])
    ropes, pairs = text["rope_parameters"], text["global_head_dim"] // 2
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(text["global_head_dim"])
    writer.add_rope_dimension_count_swa(text["head_dim"])
    turning = int(ropes["full_attention"]["partial_rotary_factor"] * text["global_head_dim"] // 2)
    factors = np.where(np.arange(pairs) < turning, 1.0, 1e30).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _granite(writer, text):
    writer.add_attention_scale(text["attention_multiplier"])
    writer.add_embedding_scale(text["embedding_multiplier"])
    writer.add_residual_scale(text["residual_multiplier"])
    writer.add_logit_scale(text["logits_scaling"])


def _phi3(writer, text):
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    original = text.get("original_max_position_embeddings", text["max_position_embeddings"])
    stretch = text["max_position_embeddings"] / original
    writer.add_sliding_window(text.get("sliding_window") or 0)
    writer.add_rope_dimension_count(int(head_dim * text.get("partial_rotary_factor", 1)))
    writer.add_rope_scaling_orig_ctx_len(original)
    if not text.get("rope_scaling"):
        return
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    for name in ("long", "short"):
        factors = np.array(text["rope_scaling"][f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _olmo2(writer, text):
    if "sliding_window" in text:
        writer.add_sliding_window(text["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in text["layer_types"]])


METADATA = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite": _granite,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "mistral3": _mistral3,
}
