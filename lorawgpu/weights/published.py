"""The `config.json` of published models, as far as it decides shapes: for benchmarks, dry runs and tests.

`CONFIGS` is by the short name that benchmarks use. The files are those of the repositories named beside them on the
Hugging Face hub; keys that only generation, vision or sound need are left out.
"""

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def every(count: int, interval: int) -> list[str]:
    """`layer_types` of `count` layers of which every `interval`th is global."""
    return [GLOBAL if (i + 1) % interval == 0 else LOCAL for i in range(count)]


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_3 = LLAMA | {
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "num_key_value_heads": 8,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
}  # fmt: skip
QWEN = {
    "hidden_act": "silu", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "vocab_size": 151936, "use_sliding_window": False, "rope_theta": 1000000.0, "bos_token_id": 151643,
    "eos_token_id": 151645,
}  # fmt: skip
QWEN_3 = QWEN | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "attention_bias": False, "rope_scaling": None, "sliding_window": None,
}  # fmt: skip
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "vocab_size": 262144,
    "head_dim": 256, "num_key_value_heads": 1, "sliding_window": 512, "attention_bias": False, "pad_token_id": 0,
    "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip

CONFIGS = {
    "bitnet-2b": {  # microsoft/bitnet-b1.58-2B-4T
        "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2",
        "torch_dtype": "bfloat16", "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30,
        "num_attention_heads": 20, "num_key_value_heads": 5, "vocab_size": 128256, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "bos_token_id": 128000,
        "eos_token_id": 128001, "quantization_config": {
            "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
        },
    },
    "falcon3-1b-1.58bit": LLAMA | {  # tiiuae/Falcon3-1B-Instruct-1.58bit
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 131072, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1000042, "tie_word_embeddings": False, "eos_token_id": 11,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "bitnet"},
    },
    "smollm2-135m": LLAMA | {  # HuggingFaceTB/SmolLM2-135M-Instruct
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    },
    "smollm2-360m": LLAMA | {  # HuggingFaceTB/SmolLM2-360M-Instruct
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    },
    "smollm2-1.7b": LLAMA | {  # HuggingFaceTB/SmolLM2-1.7B-Instruct
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 130000,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    },
    "tinyllama-1.1b": LLAMA | {  # TinyLlama/TinyLlama-1.1B-Chat-v1.0
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "llama-3.2-1b": LLAMA_3 | {  # meta-llama/Llama-3.2-1B-Instruct
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64,
    },
    "llama-3.2-3b": LLAMA_3 | {  # meta-llama/Llama-3.2-3B-Instruct
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "head_dim": 128,
    },
    "llama-3.1-8b": LLAMA_3 | {  # meta-llama/Llama-3.1-8B-Instruct
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "tie_word_embeddings": False, "rope_scaling": LLAMA_3["rope_scaling"] | {"factor": 8.0},
    },
    "qwen2.5-1.5b": QWEN | {  # Qwen/Qwen2.5-1.5B-Instruct
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "sliding_window": 32768,
        "max_window_layers": 21, "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": QWEN_3 | {  # Qwen/Qwen3-0.6B
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "max_window_layers": 28, "max_position_embeddings": 40960,
    },
    "qwen3-4b": QWEN_3 | {  # Qwen/Qwen3-4B-Instruct-2507
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_window_layers": 36, "max_position_embeddings": 262144, "rope_theta": 5000000,
    },
    "gemma-3-1b": GEMMA | {  # google/gemma-3-1b-it
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16",
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "query_pre_attn_scalar": 256, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
        "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "max_position_embeddings": 32768, "eos_token_id": [1, 106],
    },
    "gemma-4-e2b": {  # google/gemma-4-E2B-it
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "torch_dtype": "bfloat16",
        "tie_word_embeddings": True, "eos_token_id": [1, 106], "text_config": GEMMA | {
            "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
            "num_attention_heads": 8, "global_head_dim": 512, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "layer_types": every(35, 5),
            "final_logit_softcapping": 30.0, "attention_k_eq_v": False, "enable_moe_block": False,
            "num_global_key_value_heads": None, "max_position_embeddings": 131072, "rope_parameters": {
                GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    },
    "smollm3-3b": {  # HuggingFaceTB/SmolLM3-3B
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_act": "silu",
        "torch_dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "rope_scaling": None, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "sliding_window": None,
        "no_rope_layer_interval": 4, "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(36)],
        "bos_token_id": 128000, "eos_token_id": 128012, "pad_token_id": 128004,
    },
    "phi-4-mini": {  # microsoft/Phi-4-mini-instruct
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [
            1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
            2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
            6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
            16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23,
            32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
        ]},
    },
    "tiny": LLAMA | {  # a stand-in of no published model
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 8192, "rope_theta": 10000.0,
    },
}  # fmt: skip
