"""The golden cases that scripts/make_golden.py makes: options of the model families that no other case covers."""

from make_golden import Recipe

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# As PEFT's own pattern for multimodal models: the vision tower has layers of the same names.
PATTERN = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def config(architecture: str, model_type: str, **keys) -> dict:
    common = {
        "architectures": [architecture],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 40,
        "intermediate_size": 52,
        "max_position_embeddings": 512,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.003,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 97,
    }
    return common | keys


def multimodal(architecture: str, model_type: str, text: dict, vision: dict, **keys) -> dict:
    common = {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16"}
    return common | {"text_config": text, "vision_config": vision} | keys


VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 2}
QWEN2 = config("Qwen2ForCausalLM", "qwen2", hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
PHI3 = config("Phi3ForCausalLM", "phi3", hidden_size=48, intermediate_size=44, num_attention_heads=3,
              num_key_value_heads=1)  # fmt: skip
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.02, 1.1, 1.17, 1.24, 1.4, 1.61],
    "long_factor": [1.35, 2.2, 2.7, 4.1, 4.9, 6.3],
}
# The 4b model's text_config leaves out all but hidden_size, intermediate_size, num_hidden_layers, rope_scaling and
# sliding_window. Its head count, head size and vocabulary are too large for a test.
GEMMA3_TEXT = {
    "model_type": "gemma3_text",
    "hidden_size": 36,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 7,
    "vocab_size": 97,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
MINISTRAL3_TEXT = {
    key: value
    for key, value in config("", "ministral3", head_dim=16, sliding_window=None).items()
    if key not in ("architectures", "rope_theta", "torch_dtype", "tie_word_embeddings")
} | {
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 10,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.6,
        "llama_4_scaling_beta": 0.3,
    }
}

LLAMA = config("LlamaForCausalLM", "llama", num_hidden_layers=2)
GEMMA2 = config(
    "Gemma2ForCausalLM",
    "gemma2",
    attn_logit_softcapping=9.0,
    final_logit_softcapping=5.0,
    head_dim=12,
    hidden_activation="gelu_pytorch_tanh",
    num_hidden_layers=2,
    query_pre_attn_scalar=10,
    sliding_window=9,
    tie_word_embeddings=True,
)
RECIPES = {
    "qwen2_yarn": Recipe(
        QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        TARGETS,
        lengths=(31, 22),
    ),
    "qwen2_window": Recipe(
        QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
        TARGETS,
    ),
    "gemma3_multimodal": Recipe(
        multimodal(
            "Gemma3ForConditionalGeneration",
            "gemma3",
            GEMMA3_TEXT,
            VISION | {"image_size": 8, "model_type": "siglip_vision_model", "vision_use_head": False},
            boi_token_index=94,
            eoi_token_index=95,
            eos_token_id=[1, 6],
            image_token_index=96,
            mm_tokens_per_image=4,
        ),
        PATTERN,
        lengths=(33, 20),
    ),
    "ministral3": Recipe(
        multimodal(
            "Mistral3ForConditionalGeneration",
            "mistral3",
            MINISTRAL3_TEXT,
            VISION | {"image_size": 8, "head_dim": 8, "model_type": "pixtral"},
            image_token_index=10,
            spatial_merge_size=2,
            tie_word_embeddings=False,
        ),
        PATTERN,
        lengths=(37, 24),
    ),
    "smollm3_window": Recipe(
        config(
            "SmolLM3ForCausalLM",
            "smollm3",
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=5,
            no_rope_layers=[1, 0, 1, 0],
            tie_word_embeddings=True,
        ),  # fmt: skip
        TARGETS,
    ),
    "phi3_plain": Recipe(PHI3 | {"sliding_window": None, "rope_scaling": None, "tie_word_embeddings": True}, FUSED),
    "phi3_mixed": Recipe(  # one sequence with the short factors, one with the long; the greedy text crosses over
        PHI3 | {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 14},
        FUSED,
        lengths=(27, 14),
    ),
    "granite4_nope": Recipe(
        config(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            attention_multiplier=0.2,
            embedding_multiplier=3.0,
            layer_types=["attention"] * 3,
            logits_scaling=2.5,
            mamba_d_head=20,
            mamba_n_heads=4,
            num_experts_per_tok=0,
            num_local_experts=0,
            position_embedding_type=None,
            residual_multiplier=0.45,
            shared_intermediate_size=52,
        ),
        ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"],
    ),
    # What is trained outside of the layers. Ids of tokens that the batch repeats, and of one that it does not have.
    "tokens_gemma2": Recipe(GEMMA2, ["q_proj", "v_proj"], options={"trainable_token_indices": [49, 6, 95, 90, 1]}),
    "tokens_untied": Recipe(
        LLAMA,
        ["q_proj", "down_proj"],
        options={"trainable_token_indices": {"embed_tokens": [15, 52, 95, 1], "lm_head": [52, 33, 15]}},
    ),
    "saved_untied": Recipe(LLAMA, ["v_proj"], options={"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved_tied": Recipe(
        LLAMA | {"tie_word_embeddings": True}, ["v_proj"], options={"modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "lora_ends": Recipe(GEMMA2, ["o_proj", "embed_tokens", "lm_head"]),
    "lora_head": Recipe(LLAMA, ["q_proj", "lm_head"], options={"modules_to_save": ["embed_tokens"]}),
}
