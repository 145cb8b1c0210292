"""mlx-lm: `adapters.safetensors` with both matrices transposed, and an `adapter_config.json` with its own keys.

mlx-lm computes y + scale * (x @ lora_a) @ lora_b, lora_a [in, r], lora_b [r, out], with one scale and one rank for all
modules. Scales of single modules (rsLoRA, patterns) go into their lora_b; smaller ranks are padded with zeros, because
it refuses tensors of another shape. Its multimodal classes put `language_model` before `model`.
Format: https://github.com/ml-explore/mlx-lm (mlx_lm/tuner/utils.py, load_adapters)
"""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from lorawgpu.export.effect import LINEAR, WeightChange, one_scale
from lorawgpu.export.separate import fuse, separate
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import remark
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.hf import MULTIMODAL_PREFIX
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import read_json_object

RUNTIME = "mlx-lm"
MLX_WEIGHTS_FILE = "adapters.safetensors"
THEIR_PREFIX = "language_model.model."
WINDOWS = ("gemma3", "gemma4", "olmo3", "ministral3")  # families whose sliding window mlx-lm has


def write(folder: Path, source: ExportSource) -> None:
    effect = separate(source.effect)
    scale, rest = one_scale({module: change.scale for module, change in effect.items()})
    rank = max(len(change.a) for change in effect.values())
    tensors = {}
    for module, change in effect.items():
        name = _swapped(module, MULTIMODAL_PREFIX, THEIR_PREFIX)
        tensors[f"{name}.lora_a"] = _padded(change.a, rank).T.copy()
        tensors[f"{name}.lora_b"] = _padded(change.b.T * rest[module], rank)
    (folder / MLX_WEIGHTS_FILE).write_bytes(safetensors.numpy.save(tensors, metadata={"format": "mlx"}))
    config = {
        "fine_tune_type": "lora",
        "model": source.base_name,
        "num_layers": -1,  # all: mlx-lm counts from the last layer
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": source.lora.dropout,
            "keys": sorted({LINEAR.fullmatch(module)["path"] for module in effect}),
        },
    }
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def _swapped(module: str, prefix: str, other: str) -> str:
    return other + module.removeprefix(prefix) if module.startswith(prefix) else module


def _padded(matrix: np.ndarray, rank: int) -> np.ndarray:
    """`matrix` [r, n] padded with zero rows: float32 [rank, n]."""
    padded = np.zeros((rank, matrix.shape[1]), np.float32)
    padded[: len(matrix)] = matrix
    return padded


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    scale = read_json_object(folder / ADAPTER_CONFIG_FILE)["lora_parameters"]["scale"]
    file = SafetensorsFile(folder / MLX_WEIGHTS_FILE)
    changes = {}
    for name in file.entries:
        if name.endswith(".lora_a"):
            base = name.removesuffix(".lora_a")
            a, b = file.read(name).T, file.read(f"{base}.lora_b").T
            changes[_swapped(base, THEIR_PREFIX, MULTIMODAL_PREFIX)] = WeightChange(a, b, scale)
    return fuse(changes, source.effect)


def remarks(source: ExportSource) -> list[str]:
    found = []
    ternary = source.ternary
    if ternary is None or ternary:
        unknown = "if this is one (unknown without --model), " if ternary is None else ""
        found.append(
            f"BitNet models: {unknown}mlx-lm supports adapters on nn.Linear only and fails on its BitLinear "
            '("Can\'t convert layer of type BitLinear to LoRA"), which also does not round activations to int8 as in '
            "training"
        )
    if len(set(source.scales.values())) > 1:
        found.append("modules with different scales: mlx-lm has one scale, the remaining factors are in their lora_b")
    if len({len(change.a) for change in source.effect.values()}) > 1:
        found.append("modules with different ranks: mlx-lm has one rank, smaller ones are padded with zeros")
    found += remark(source, "mlx-lm stops there with --extra-eos-token")
    return found + (_family_remarks(source.config) if source.config else [])


def _family_remarks(config: ModelConfig) -> list[str]:
    """What mlx-lm does otherwise with the base model, whether or not it has an adapter."""
    found, windows = [], [layer.attention.window for layer in config.layers if layer.attention.window is not None]
    if windows and config.family not in WINDOWS:
        found.append(
            f"the base model's sliding window of {min(windows)} tokens is ignored: mlx-lm attends to all tokens, so "
            "longer sequences give other logits than in training"
        )
    if config.longest_short:
        found.append("longrope: mlx-lm uses the long factors at every length, so short sequences give other logits")
    return found
