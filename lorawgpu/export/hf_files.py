"""What transformers needs beside the weights, for a model that came as GGUF: config and tokenizer files."""

import json
from pathlib import Path

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.families.config import ModelConfig, Rope
from lorawgpu.files.run_folder import CHAT_TEMPLATE_FILE
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint

TORCH_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
PROBE = "Hello, world! 1234 naïve café\n\n  def f(x): return x**2  # 日本語 <|im_end|>"


def write_hf_files(folder: Path, checkpoint: GgufCheckpoint) -> None:
    """config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja.

    UserError for a RoPE scaling that config.json cannot express. CheckFailed when the tokenizer reads back as another.
    """
    config = checkpoint.config
    dtype = checkpoint.dense("model.layers.0.mlp.down_proj.weight").dtype
    _write(folder / "config.json", config_json(config, TORCH_DTYPES[dtype]))
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids) or None}
    ids |= {"pad_token_id": config.pad_token_id}
    _write(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    write_tokenizer(folder, checkpoint.tokenizer(), config.max_position_embeddings)


def _write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_json(config: ModelConfig, torch_dtype: str) -> dict:
    """The config.json of a dense Llama, in the spelling that every transformers version reads."""
    theta, scaling = rope_settings(config)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": config.act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": scaling,
        "rope_theta": theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": torch_dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def rope_settings(config: ModelConfig) -> tuple[float, dict | None]:
    """rope_theta and rope_scaling. A GGUF holds Llama 3's scaling as a factor a frequency: found again by trying.

    UserError when no Llama 3 scaling makes these factors.
    """
    rope = config.rope
    if rope.freq_factors is None or np.allclose(rope.freq_factors, 1.0):
        return rope.theta, None
    wanted = rope.inv_freq(config.head_dim)
    factor = float(max(rope.freq_factors))
    for original in (8192, config.max_position_embeddings):
        tried = Rope(rope.theta, "llama3", factor, 1.0, 4.0, original)
        if np.allclose(tried.inv_freq(config.head_dim), wanted, rtol=1e-5, atol=0):
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return rope.theta, {"rope_type": "llama3"} | {name: getattr(tried, name) for name in names}
    raise UserError(
        "the GGUF's rope_freqs.weight is no Llama 3 scaling that config.json can express; merge into the model's "
        "Hugging Face folder instead"
    )


def write_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int) -> None:
    """The files of a fast tokenizer, read back and compared on a text of every kind."""
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **tokenizer.special_tokens,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
        (folder / CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
    _write(folder / "tokenizer_config.json", config)
    again = Tokenizer.from_hf_folder(folder)
    for special in (False, True):
        if again.encode(PROBE, add_special=special) != tokenizer.encode(PROBE, add_special=special):
            raise CheckFailed(f"{folder}: the tokenizer, read back, cuts text otherwise than the GGUF's")
    if (again.special_tokens, again.chat_template) != (tokenizer.special_tokens, tokenizer.chat_template):
        raise CheckFailed(f"{folder}: the tokenizer, read back, has other special tokens or another template")
