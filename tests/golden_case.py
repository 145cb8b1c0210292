"""Read a golden case, and put its model before the float64 reference."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from lorawgpu.data.batching import MicroBatch, Sample, flatten
from lorawgpu.doctor.tiny_models import reference_model
from lorawgpu.reference.model import ReferenceModel
from lorawgpu.verify.cases import own_model
from lorawgpu.weights.loader import open_checkpoint

__all__ = ["FAMILY_CASES", "GGUF_CASES", "GOLDEN", "SMALL_CASES", "ReferenceCase", "reference_case", "reference_model"]

GOLDEN = Path(__file__).parent / "golden"
FAMILY_CASES = (
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_dense",
    "smollm3",
    "mistral_window",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "granite4",
    # Ours, by scripts/make_golden.py.
    "qwen2_yarn",
    "qwen2_window",
    "gemma3_multimodal",
    "ministral3",
    "smollm3_window",
    "phi3_plain",
    "phi3_mixed",
    "granite4_nope",
)
SMALL_CASES = ("bitnet_master", "bitnet_packed", "bitnet_q_only", "llama_bitlinear", "llama_dense")
GGUF_CASES = ("llama_q4_k_m", "llama_q8_0")


@dataclass(frozen=True)
class ReferenceCase:
    settings: dict  # case.json
    expected: dict  # expected.npz
    batch: MicroBatch  # without padding: the rows where attention_mask is 1
    mask: np.ndarray  # bool [B, T]
    model: ReferenceModel


def reference_case(name):
    """One of SMALL_CASES, FAMILY_CASES or GGUF_CASES."""
    folder = GOLDEN / name
    settings = json.loads((folder / "case.json").read_text())
    arrays = np.load(folder / "batch.npz")
    mask = arrays["attention_mask"].astype(bool)
    samples = [
        Sample(ids[keep], labels[keep])
        for ids, labels, keep in zip(arrays["input_ids"], arrays["labels"], mask, strict=True)
    ]
    adapter = load_file(folder / "adapter_init" / "adapter_model.safetensors")
    model = reference_model(
        open_checkpoint(own_model(folder)), adapter, settings["lora"]["alpha"] / settings["lora"]["r"]
    )
    return ReferenceCase(settings, dict(np.load(folder / "expected.npz")), flatten(samples, mask.sum()), mask, model)
