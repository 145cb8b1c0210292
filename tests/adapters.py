"""A small model's adapter for tests: no value of it is 0, so that a lost tensor shows."""

import json

import numpy as np

from lorawgpu.doctor.tiny_models import tiny_config
from lorawgpu.families.rope import Rope
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import adapter_shapes

MODEL = tiny_config(
    vocab_size=96, hidden=24, width=40, count=3, heads=4, kv_heads=2, head_dim=8, rope=Rope(10000.0),
    tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
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
