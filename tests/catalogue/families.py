"""Mistakes in the options of model families: config.json and GGUF metadata."""

import json
from functools import partial

import gguf as gguf_library
import test_gguf
from family_gguf import write_case

from . import GOLDEN, change, copy_of, evaluate, tensors_of, write_tensors


def config(folder, case, **keys):
    model = copy_of(GOLDEN / case, folder)
    change(model / "config.json", **keys)
    return evaluate(folder, model)


def text_config(folder, case, **keys):
    settings = json.loads((GOLDEN / case / "config.json").read_text())["text_config"]
    return config(folder, case, text_config={k: v for k, v in (settings | keys).items() if v is not ...})


def bias_of_o(folder):
    model, name = copy_of(GOLDEN / "qwen2", folder), "model.layers.0.self_attn.o_proj.bias"
    path = model / "model.safetensors"
    header, data = tensors_of(path)
    header[name] = {"dtype": "F32", "shape": [60], "data_offsets": [len(data), len(data) + 240]}
    write_tensors(path, header, data + bytes(240))
    return evaluate(folder, model)


def rope(folder, case="llama_dense", **settings):
    return config(folder, case, rope_scaling=settings)


def gguf(folder, arch="llama", **metadata):
    path = test_gguf.write_gguf(folder / "m.gguf", arch=arch, metadata=metadata)
    return evaluate(folder, path)


def case_gguf(folder, case, arch, **metadata):
    """A family's case as GGUF with these lists as values of keys below the architecture's name, dots written as __."""
    types = gguf_library.GGUFValueType

    def edit(writer):
        for key, value in metadata.items():
            kind = types.BOOL if isinstance(value[0], bool) else types.INT32
            array = gguf_library.GGUFValue(value, types.ARRAY, kind)
            writer.kv_data[0][f"{arch}.{key.replace('__', '.')}"] = array

    return evaluate(folder, write_case(GOLDEN / case, folder / "m.gguf", arch, edit))


def merged_gguf(folder, case, arch):
    """Merging the case's adapter into its GGUF form."""
    path = write_case(GOLDEN / case, folder / "m.gguf", arch)
    return [
        "export",
        "--adapter",
        GOLDEN / case / "adapter_init",
        "--to",
        "merged",
        "--model",
        path,
        "--out",
        folder / "out",
    ]


YARN, LONG = {"rope_type": "yarn", "factor": 2.0}, {"type": "longrope", "long_factor": [1.0] * 6}
CASES = {
    "another quantization": (
        partial(config, case="qwen3", quantization_config={"quant_method": "hqq", "bits": 4}),
        "quantization_config: quant_method 'hqq' is not supported",
    ),
    "experts": (partial(text_config, case="gemma4", enable_moe_block=True), "enable_moe_block (mixture of experts)"),
    "Qwen3.5": (partial(config, case="qwen3", model_type="qwen3_5"), "model_type 'qwen3_5' (gated delta nets)"),
    "a model of experts": (
        partial(config, case="qwen3", model_type="qwen3_moe"),
        "model_type 'qwen3_moe' (a mixture of experts) is not supported",
    ),
    "experts of the hybrid": (
        partial(config, case="granite4", num_local_experts=4),
        "num_local_experts (mixture of experts) = 4",
    ),
    "linear attention": (
        partial(config, case="qwen2", layer_types=["linear_attention"] * 3),
        "wanted 3 of sliding_attention or full_attention",
    ),
    "biases of the MLP": (partial(config, case="smollm3", mlp_bias=True), "mlp_bias = True is not supported yet"),
    "biases of Qwen3": (partial(config, case="qwen3", attention_bias=True), "attention_bias (qkv_bias) = True"),
    "a bias of o": (bias_of_o, "1 tensor (model.layers.0.self_attn.o_proj.bias) not part of the config's"),
    "bidirectional Gemma 3": (
        partial(config, case="gemma3", use_bidirectional_attention=True),
        "use_bidirectional_attention (bidirectional attention) = True",
    ),
    "a bidirectional Llama": (
        partial(config, case="llama_dense", is_causal=False),
        "is_causal (bidirectional attention) = False",
    ),
    "sizes by layer": (
        partial(text_config, case="gemma4", per_layer_config={"0": {"head_dim": 8}}),
        "wanted the same head_dim and num_key_value_heads for all full_attention layers",
    ),
    "scaled queries that rotate in part": (
        partial(config, case="phi3", rope_scaling={"rope_type": "default", "llama_4_scaling_beta": 0.1}),
        "llama_4_scaling_beta together with partial_rotary_factor is not supported",
    ),
    "biases of all projections": (
        partial(config, case="llama_dense", attention_bias=True),
        "attention_bias (qkv_bias)",
    ),
    "Mamba layers": (
        partial(config, case="granite4", layer_types=["attention", "mamba", "attention"]),
        "no Mamba layers",
    ),
    "a position embedding of the hybrid": (
        partial(config, case="granite4", position_embedding_type="learned"),
        "position_embedding_type is 'learned'; wanted rope, nope or null",
    ),
    "local layers of a model without them": (
        partial(config, case="llama_dense", layer_types=["sliding_attention", "full_attention"]),
        "wanted full_attention only",
    ),
    "too few layer types": (
        partial(config, case="gemma3", layer_types=["full_attention"]),
        "wanted 4 of sliding_attention",
    ),
    "an unknown layer type": (
        partial(config, case="gemma3", layer_types=["chunked_attention"] * 4),
        "wanted 4 of sliding",
    ),
    "a window of nothing": (
        partial(config, case="mistral_window", sliding_window=0),
        "sliding_window is 0; wanted a whole",
    ),
    "exact GELU": (partial(config, case="gemma3", hidden_activation="gelu"), "wanted gelu_pytorch_tanh"),
    "another activation": (partial(config, case="llama_dense", hidden_act="tanh"), "wanted silu or relu2"),
    "layers without RoPE": (partial(config, case="smollm3", no_rope_layers=[1, 0]), "wanted 4 of 0 and 1"),
    "no text part": (partial(config, case="gemma4", text_config=None), "text_config is None; wanted an object"),
    "a text part of another model": (
        partial(text_config, case="gemma4", model_type="llama"),
        "text_config: model_type 'llama' is not supported",
    ),
    "bidirectional attention": (
        partial(text_config, case="gemma4", use_bidirectional_attention="all"),
        "wanted vision",
    ),
    "no layer to share with": (
        partial(text_config, case="gemma4", num_kv_shared_layers=6),
        "leaves no full_attention layer with keys and values of its own",
    ),
    "RoPE by layer type": (
        partial(config, case="llama_dense", rope_parameters={"full_attention": {"rope_type": "default"}}),
        "wanted one object of settings for all layers",
    ),
    "RoPE settings of a layer type": (
        partial(config, case="gemma3", rope_parameters={"full_attention": {}, "sliding_attention": 3}),
        "sliding_attention is 3; wanted an object of settings",
    ),
    "an unknown RoPE": (partial(rope, rope_type="dynamic", factor=2.0), "rope_type 'dynamic' is not supported"),
    "more than all of a head": (
        partial(config, case="phi3", partial_rotary_factor=1.5),
        "partial_rotary_factor is 1.5; wanted a number above 0, at most 1",
    ),
    "an odd part of a head": (partial(config, case="phi3", partial_rotary_factor=0.7), "rotates 11 of 16 dimensions"),
    "truncate": (partial(rope, **YARN, truncate="no"), "truncate is 'no'; wanted true or false"),
    "factors of other pairs": (
        partial(rope, case="phi3", **LONG, short_factor=[1.0]),
        "wanted a list of 6 numbers above 0",
    ),
    "an original context of one token": (
        partial(rope, **YARN, original_max_position_embeddings=1),
        "original_max_position_embeddings is 1; wanted at least 2",
    ),
    "GGUF of an unknown family": (partial(gguf, arch="gptneox"), "architecture 'gptneox' is not supported; wanted"),
    "GGUF with layers of several widths": (
        partial(case_gguf, case="qwen3", arch="qwen3", feed_forward_length=[52, 52, 48]),
        "wanted the same for all layers",
    ),
    "GGUF with an unknown RoPE": (
        partial(gguf, **{"rope.scaling.type": "dynamic"}),
        "rope.scaling.type = 'dynamic' (rope scaling) is not supported yet",
    ),
    "GGUF with too few sizes": (
        partial(case_gguf, case="gemma4", arch="gemma4", attention__head_count_kv=[1, 1]),
        "wanted 7 whole numbers",
    ),
    "GGUF with too few layer types": (
        partial(case_gguf, case="gemma4", arch="gemma4", attention__sliding_window_pattern=[True]),
        "wanted 7 booleans",
    ),
    "a merged folder of a Gemma 4 GGUF": (
        partial(merged_gguf, case="gemma4_dense", arch="gemma4"),
        "which has towers for images and sound",
    ),
}
