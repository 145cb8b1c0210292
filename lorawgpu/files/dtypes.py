"""The dense dtypes of checkpoints and adapters."""

import numpy as np

DENSE_TYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}  # safetensors' and GGUF's name: ours


def widen(data: np.ndarray, dtype: str) -> np.ndarray:
    """`data` in one of our dtypes (bf16 as uint16) as float32, which is exact."""
    if dtype == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
