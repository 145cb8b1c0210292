"""A small model's adapter for tests: no value of it is 0, so that a lost tensor shows."""

import json

import numpy as np

from lorawgpu.families.config import ModelConfig, Rope
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes

MODEL = ModelConfig(
    family="llama", vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5, rope=Rope(10000.0), act="silu",
    sub_norms=False, tie_word_embeddings=True, ternary=None, bos_token_id=1, eos_token_ids=(2,), pad_token_id=None,
)  # fmt: skip
LORA = LoraConfig(r=4, alpha=8, target_modules=("q_proj", "down_proj"))


def alive(lora=LORA, model=MODEL, seed=0):
    """An adapter in which no value is 0, so that a lost tensor shows."""
    random = np.random.default_rng(seed)
    return {n: random.standard_normal(s).astype(np.float32) for n, s in adapter_shapes(lora, model).items()}


def edit(folder, **keys):
    path = folder / ADAPTER_CONFIG_FILE
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "DELETED"}))
