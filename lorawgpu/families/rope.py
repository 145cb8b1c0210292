"""Rotary position embedding: frequencies, read from `config.json` and written to it.

The formulas are those of transformers' modeling_rope_utils.py.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.keys import Keys
from lorawgpu.files.untrusted import brief

ORIGINAL = "original_max_position_embeddings"
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    kind: one of KINDS, or "none" (positions are not encoded). rotary_dim: how many dimensions of a head rotate; None:
    all. factor: by how much the context was stretched; `yarn` blends between the pairs low_freq_factor and
    high_freq_factor, `llama3` between wavelengths given by them. attention_factor multiplies cosines and sines.
    long_factors: `longrope`'s divisors for a sequence longer than original_max_position_embeddings; freq_factors those
    of the others. GGUF also stores the stretching of `llama3` as freq_factors. query_beta: of `query_scale`.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    freq_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    rotary_dim: int | None = None
    partial: float = 1.0  # `proportional`: the fraction of pairs that rotate
    query_beta: float = 0.0

    def rotary(self, head_dim: int) -> int:
        """The number of dimensions of a head that rotate; pairs are (i, i + rotary / 2)."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def switches(self) -> bool:
        """Whether frequencies depend on the length of the sequence."""
        return self.long_factors is not None

    def query_scale(self, position: np.ndarray) -> np.ndarray:
        """Ministral 3's factor of the queries at a position: 1 + beta ln(1 + floor(position / original))."""
        if not self.query_beta:
            return np.ones(len(position))
        return 1.0 + self.query_beta * np.log1p(np.asarray(position) // self.original_max_position_embeddings)

    def inv_freq(self, head_dim: int, long: bool = False) -> np.ndarray:
        """Angular frequency of each pair, float64 `[rotary/2]`: `theta^(-2i/rotary)`, then scaled.

        long: for a sequence longer than original_max_position_embeddings.
        """
        rotary = self.rotary(head_dim)
        pairs = np.arange(rotary // 2)
        inv = float(self.theta) ** (-2.0 * pairs / rotary)
        factors = self.long_factors if long and self.switches else self.freq_factors
        if factors is not None:
            inv = inv / np.asarray(factors, dtype=np.float64)
        if self.kind == "none":
            return np.zeros_like(inv)
        if self.kind == "linear":
            return inv / self.factor
        if self.kind == "proportional":
            return np.where(pairs < int(self.partial * rotary // 2), inv / self.factor, 0.0)
        if self.kind == "yarn":
            low, high = self.low_freq_factor, self.high_freq_factor
            blend = np.clip((pairs - low) / (high - low if high != low else 0.001), 0.0, 1.0)
            return inv / self.factor * blend + inv * (1 - blend)
        if self.kind == "llama3":
            turns = self.original_max_position_embeddings * inv / (2 * math.pi)  # over the original context
            blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
            return (1 - blend) * inv / self.factor + blend * inv
        return inv


def read_rope(keys: Keys, layer_type: str | None = None, **defaults) -> Rope:
    """The RoPE of the layers of `layer_type`: `rope_scaling`, or else `rope_parameters`, and `rope_theta`.

    `rope_scaling` wins, as in transformers; either may be nested by layer type. `defaults`: settings that hold where
    the file says nothing, such as `rope_theta`.
    """
    data, source = keys.data, keys.source
    spelling = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    settings = data.get(spelling) or {}
    if not isinstance(settings, dict):
        raise UserError(f"{source}: {spelling} is {brief(settings)}; wanted an object of settings.")
    if any(isinstance(value, dict) for value in settings.values()):
        if layer_type is None:
            raise UserError(f"{source}: {spelling} is {brief(settings)}; wanted one object of settings for all layers.")
        settings = settings.get(layer_type) or {}
        if not isinstance(settings, dict):
            raise UserError(f"{source}: {spelling}, {layer_type} is {brief(settings)}; wanted an object of settings.")
    top = {key: data[key] for key in ("rope_theta", "partial_rotary_factor", ORIGINAL) if data.get(key) is not None}
    if "rope_theta" in defaults:
        top.pop("rope_theta", None)
    given = {key: value for key, value in settings.items() if value is not None}
    if layer_type is None and ORIGINAL in top:
        given[ORIGINAL] = top[ORIGINAL]  # transformers prefers it, even to settings of RoPE itself
    return _rope(Keys({**top, **defaults, **given}, f"{source}, {spelling}"), keys)


def _rope(inner: Keys, keys: Keys) -> Rope:
    settings = inner.data
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = {"su": "longrope"}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise UserError(f"{inner.source}: rope_type {brief(kind)} is not supported; wanted one of {', '.join(KINDS)}.")
    head_dim = keys.head_dim()
    rope = Rope(Keys(settings, keys.source).number("rope_theta"), kind)
    partial = inner.number("partial_rotary_factor") if "partial_rotary_factor" in settings else 1.0
    if partial > 1:
        raise UserError(f"{inner.source}: partial_rotary_factor is {partial}; wanted a number above 0, at most 1.")
    if kind == "proportional":
        factor = inner.number("factor") if "factor" in settings else 1.0
        return replace(rope, partial=partial, factor=factor)
    if partial != 1:
        rope = replace(rope, rotary_dim=int(head_dim * partial))
        if rope.rotary_dim % 2 or rope.rotary_dim < 2:
            raise UserError(
                f"{inner.source}: partial_rotary_factor {partial} rotates {rope.rotary_dim} of {head_dim} dimensions; "
                "wanted an even number."
            )
    read = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}.get(kind)
    return _scaled_queries(read(rope, inner, keys) if read else rope, inner)


def _scaled_queries(rope: Rope, inner: Keys) -> Rope:
    name = "llama_4_scaling_beta"
    if not inner.data.get(name):
        return rope
    if rope.rotary_dim is not None:
        raise UserError(f"{inner.source}: {name} together with partial_rotary_factor is not supported.")
    original = inner.number(ORIGINAL)
    return replace(rope, query_beta=inner.number(name), original_max_position_embeddings=int(original))


def _linear(rope: Rope, inner: Keys, keys: Keys) -> Rope:
    return replace(rope, factor=inner.number("factor"))


def _llama3(rope: Rope, inner: Keys, keys: Keys) -> Rope:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise UserError(f"{inner.source}: low_freq_factor {low} is not below high_freq_factor {high}.")
    context = _original(inner, keys)
    return replace(rope, factor=inner.number("factor"), low_freq_factor=low, high_freq_factor=high,
                   original_max_position_embeddings=int(context))  # fmt: skip


def _yarn(rope: Rope, inner: Keys, keys: Keys) -> Rope:
    """`low` and `high` become the pairs between which YaRN blends."""
    original = _original(inner, keys)
    factor = inner.number("factor") if "factor" in inner.data else _stretch(keys, original)
    low, high = (
        yarn_pair(_optional(inner, name, default), rope.rotary(keys.head_dim()), rope.theta, original)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = inner.data.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{inner.source}: truncate is {brief(truncate)}; wanted true or false.")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary(keys.head_dim()) - 1)
    rope = replace(rope, factor=factor, original_max_position_embeddings=int(original))
    return replace(rope, low_freq_factor=float(low), high_freq_factor=float(high),
                   attention_factor=_yarn_attention(inner, factor))  # fmt: skip


def yarn_pair(turns: float, rotary: int, theta: float, original: float) -> float:
    """The index of the pair that turns `turns` times over the original context (transformers' find_correction_dim)."""
    return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention(inner: Keys, factor: float) -> float:
    if "attention_factor" in inner.data:
        return inner.number("attention_factor")
    if inner.data.get("mscale") and inner.data.get("mscale_all_dim"):
        return yarn_scale(factor, inner.number("mscale")) / yarn_scale(factor, inner.number("mscale_all_dim"))
    return yarn_scale(factor)


def _longrope(rope: Rope, inner: Keys, keys: Keys) -> Rope:
    original = _original(inner, keys)
    factor = inner.number("factor") if "factor" in inner.data else _stretch(keys, original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    pairs = rope.rotary(keys.head_dim()) // 2
    short, long = (_factors(inner, name, pairs) for name in ("short_factor", "long_factor"))
    return replace(rope, freq_factors=short, long_factors=long, original_max_position_embeddings=int(original),
                   attention_factor=_optional(inner, "attention_factor", default))  # fmt: skip


def _factors(inner: Keys, name: str, pairs: int) -> tuple[float, ...]:
    values = inner.data.get(name)
    good = isinstance(values, list) and all(type(v) in (int, float) and 0 < v < 1e30 for v in values)
    if not good or len(values) != pairs:
        raise UserError(f"{inner.source}: {name} is {brief(values)}; wanted a list of {pairs} numbers above 0.")
    return tuple(map(float, values))


def _original(inner: Keys, keys: Keys) -> float:
    original = _optional(inner, ORIGINAL, keys.number("max_position_embeddings"))
    if original < 2:
        raise UserError(f"{inner.source}: {ORIGINAL} is {original:g}; wanted at least 2.")
    return original


def _stretch(keys: Keys, original: float) -> float:
    return keys.number("max_position_embeddings") / original


def _optional(keys: Keys, name: str, default: float) -> float:
    return keys.number(name) if keys.data.get(name) is not None else default


def rope_settings(rope: Rope, head_dim: int, max_positions: int) -> tuple[float, dict | None]:
    """`rope_theta` and `rope_scaling` for a `config.json`.

    GGUF stores Llama 3's scaling as one factor per frequency, so its settings are found by trial. UserError if no
    Llama 3 scaling gives these factors.
    """
    if rope.kind == "llama3":
        return rope.theta, {"rope_type": "llama3"} | {name: getattr(rope, name) for name in LLAMA3_KEYS}
    if rope.kind == "linear":
        return rope.theta, {"rope_type": "linear", "factor": rope.factor}
    if rope.kind == "yarn":
        return rope.theta, {"rope_type": "yarn", "factor": rope.factor, "attention_factor": rope.attention_factor,
                            LLAMA3_KEYS[-1]: rope.original_max_position_embeddings}  # fmt: skip
    if rope.kind == "longrope":
        return rope.theta, {"rope_type": "longrope", "short_factor": list(rope.freq_factors or ()),
                            "long_factor": list(rope.long_factors or ()),
                            "attention_factor": rope.attention_factor}  # fmt: skip
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
