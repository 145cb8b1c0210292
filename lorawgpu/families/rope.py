"""Rotary position embedding: frequencies, and their form in `config.json`."""

import math
from dataclasses import dataclass

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.keys import Keys
from lorawgpu.files.untrusted import brief

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind`: `default`, or `llama3` (long wavelengths stretched by `factor`).

    `freq_factors` (GGUF's `rope_freqs.weight`, HD/2 values) divides each frequency; GGUF stores the stretching of a
    `llama3` model in this form.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    freq_factors: tuple[float, ...] | None = None

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Angular frequency of each pair, float64 `[HD/2]`: `theta^(-2i/HD)`, then scaled.

        `llama3` is transformers' `_compute_llama3_parameters`: wavelengths above `original/low` are stretched by
        `factor`, those below `original/high` are kept, and those in between are blended.
        """
        inv = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.freq_factors is not None:
            inv = inv / np.asarray(self.freq_factors, dtype=np.float64)
        if self.kind != "llama3":
            return inv
        turns = self.original_max_position_embeddings * inv / (2 * math.pi)  # rotations over the original context
        blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1 - blend) * inv / self.factor + blend * inv


def read_rope(keys: Keys) -> Rope:
    """Read `rope_parameters`, or else `rope_theta` and `rope_scaling`; the first wins, as in transformers."""
    data, source = keys.data, keys.source
    spelling = "rope_parameters" if data.get("rope_parameters") else "rope_scaling"
    settings = data.get(spelling) or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise UserError(f"{source}: {spelling} is {brief(settings)}; wanted one object of settings for all layers.")
    settings = {key: value for key, value in settings.items() if value is not None}
    inner = Keys(settings, f"{source}, {spelling}")
    if settings.get("partial_rotary_factor", 1) != 1:
        got = brief(settings["partial_rotary_factor"])
        raise UserError(f"{inner.source}: partial_rotary_factor {got} is not supported.")
    kind = settings.get("rope_type", settings.get("type", "default"))
    theta = Keys({"rope_theta": data["rope_theta"], **settings}, source).number("rope_theta")
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise UserError(f"{inner.source}: rope_type {brief(kind)} is not supported; wanted default or llama3.")
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise UserError(f"{inner.source}: low_freq_factor {low} is not below high_freq_factor {high}.")
    original = LLAMA3_KEYS[-1]
    context = Keys({original: data["max_position_embeddings"], **settings}, inner.source).number(original)
    return Rope(theta, "llama3", inner.number("factor"), low, high, int(context))


def rope_settings(rope: Rope, head_dim: int, max_positions: int) -> tuple[float, dict | None]:
    """`rope_theta` and `rope_scaling` for a `config.json`.

    GGUF stores Llama 3's scaling as one factor per frequency, so its settings are found by trial. UserError if no
    Llama 3 scaling gives these factors.
    """
    if rope.kind == "llama3":
        return rope.theta, {"rope_type": "llama3"} | {name: getattr(rope, name) for name in LLAMA3_KEYS}
    if rope.freq_factors is None or np.allclose(rope.freq_factors, 1.0):
        return rope.theta, None
    factor = float(max(rope.freq_factors))
    for original in (8192, max_positions):
        candidate = Rope(rope.theta, "llama3", factor, 1.0, 4.0, original)
        if np.allclose(candidate.inv_freq(head_dim), rope.inv_freq(head_dim), rtol=1e-5, atol=0):
            return rope_settings(candidate, head_dim, max_positions)
    raise UserError(
        "the GGUF's rope_freqs.weight is not a Llama 3 scaling, so config.json cannot express it; use the model's "
        "Hugging Face folder as the base instead"
    )
