"""What tells runs apart: the base model by its files, the adapter by its settings and its start."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from lorawgpu.files.digest import remembered_digest
from lorawgpu.files.paths import default_cache_dir
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.weights.loader import Checkpoint


def model_digest(checkpoint: Checkpoint) -> str:
    """A hash of a model's settings and of every byte of its weight files; see `remembered_digest` for when they are
    read."""
    hashed = hashlib.sha256(checkpoint.settings())
    path = Path(checkpoint.path)
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        hashed.update(remembered_digest(file, default_cache_dir()).encode())
    return hashed.hexdigest()


def start_digest(start: dict[str, np.ndarray]) -> str:
    """A hash of the adapter that a run continues from."""
    hashed = hashlib.sha256()
    for name, tensor in start.items():
        hashed.update(name.encode())
        hashed.update(np.ascontiguousarray(tensor))
    return hashed.hexdigest()


def adapter_identity(lora: LoraConfig) -> dict[str, Any]:
    """What the adapter is, under the config's keys: one to continue from has its own rank, alpha and targets."""
    targets = lora.target_modules
    return {
        "lora_r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_target_modules": targets if isinstance(targets, str) else sorted(targets),
        "use_rslora": lora.use_rslora,
        "lora_modules_to_save": list(lora.modules_to_save),
        "peft_trainable_token_indices": {end: list(ids) for end, ids in lora.trainable_token_indices.items()},
        "rank_pattern": lora.rank_pattern,
        "alpha_pattern": lora.alpha_pattern,
    }
