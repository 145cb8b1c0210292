"""mlx-lm: `adapters.safetensors` with both matrices transposed, and an `adapter_config.json` of its own keys.

mlx-lm computes y + scale * (x @ lora_a) @ lora_b, lora_a [in, r], lora_b [r, out], with one scale and one rank for all
modules. What rsLoRA and patterns change of the scale in single modules goes into their lora_b; smaller ranks are filled
up with zeros, for it refuses a tensor of another shape.
Format: https://github.com/ml-explore/mlx-lm (mlx_lm/tuner/utils.py, load_adapters)
"""

import json
import re
from pathlib import Path

import numpy as np
import safetensors.numpy

from lorawgpu.export.effect import LINEAR, WeightChange, one_scale
from lorawgpu.export.source import ExportSource
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import read_json_object

RUNTIME = "mlx-lm"
MLX_WEIGHTS_FILE = "adapters.safetensors"


def write(folder: Path, source: ExportSource) -> None:
    scale, rest = one_scale(source.scales)
    rank = max(len(change.a) for change in source.effect.values())
    tensors = {}
    for module, change in source.effect.items():
        tensors[f"{module}.lora_a"] = _filled(change.a, rank).T.copy()
        tensors[f"{module}.lora_b"] = _filled(change.b.T * rest[module], rank)
    (folder / MLX_WEIGHTS_FILE).write_bytes(safetensors.numpy.save(tensors, metadata={"format": "mlx"}))
    config = {
        "fine_tune_type": "lora",
        "model": source.base_name,
        "num_layers": -1,  # all: mlx-lm counts from the last layer
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": source.lora.dropout,
            "keys": sorted({LINEAR.fullmatch(module)["path"] for module in source.effect}),
        },
    }
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _filled(matrix: np.ndarray, rank: int) -> np.ndarray:
    """float32 [rank, n] that begins with `matrix` [r, n], the rest 0."""
    filled = np.zeros((rank, matrix.shape[1]), np.float32)
    filled[: len(matrix)] = matrix
    return filled


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    scale = read_json_object(folder / ADAPTER_CONFIG_FILE)["lora_parameters"]["scale"]
    file = SafetensorsFile(folder / MLX_WEIGHTS_FILE)
    modules = [re.fullmatch(r"(.+)\.lora_a", name)[1] for name in file.entries if name.endswith(".lora_a")]
    return {m: WeightChange(file.read(f"{m}.lora_a").T, file.read(f"{m}.lora_b").T, scale) for m in modules}


def remarks(source: ExportSource) -> list[str]:
    found = []
    ternary = source.ternary
    if ternary is None or ternary:
        unknown = "if the base is one (without --model that is not known here), " if ternary is None else ""
        found.append(
            f"BitNet models: {unknown}mlx-lm makes adapters for nn.Linear only and stops at its BitLinear "
            '("Can\'t convert layer of type BitLinear to LoRA"), which also does not round activations to int8 as the '
            "model was trained"
        )
    if len(set(source.scales.values())) > 1:
        found.append("modules with scales of their own: mlx-lm knows one scale, the rest is inside their lora_b")
    if len({len(change.a) for change in source.effect.values()}) > 1:
        found.append("ranks by module: mlx-lm knows one, the smaller ones are filled up with zeros")
    return found
