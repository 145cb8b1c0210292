"""What a model is: sizes, options, and where the scales of its weights come from.

Read by `config_hf.from_hf` from a `config.json` and by `config_gguf.from_gguf` from GGUF metadata.
"""

import math
from dataclasses import dataclass

import numpy as np

from lorawgpu.errors import UserError

# Upper bounds that no published model comes near; they keep a hostile file from asking for endless work. That of
# head_dim is what the attention kernels can do: ops.attention.MAX_HEAD_DIM (a test holds the two together).
SIZE_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 256,
    "max_position_embeddings": 1 << 30,
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind`: `default`, or `llama3` (long wavelengths stretched by `factor`).

    `freq_factors` (GGUF's `rope_freqs.weight`, HD/2 values) divides each frequency; a GGUF of a `llama3`
    model carries the stretching in that form.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    freq_factors: tuple[float, ...] | None = None

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """Angular frequency of each pair, float64 `[HD/2]`: `theta^(-2i/HD)`, then the scaling.

        `llama3` as in transformers' `_compute_llama3_parameters`: a wavelength above `original/low` is
        stretched by `factor`, one below `original/high` is kept, and between them the two are blended.
        """
        inv = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.freq_factors is not None:
            inv = inv / np.asarray(self.freq_factors, dtype=np.float64)
        if self.kind != "llama3":
            return inv
        turns = self.original_max_position_embeddings * inv / (2 * math.pi)  # turns over the original context
        blend = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return (1 - blend) * inv / self.factor + blend * inv


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one decoder; names are Hugging Face's.

    `ternary` says how a BitLinear's scale `w` comes from the file: `multiply` (w = weight_scale), `divide`
    (w = 1 / weight_scale), `online` (w = mean|W| of master weights), None for a dense model.
    Everything from `qkv_bias` on is an option of families to come: neutral today, other values are refused.
    """

    family: str  # "bitnet" | "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    act: str  # "relu2" | "silu"
    sub_norms: bool
    tie_word_embeddings: bool
    ternary: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()  # one entry a layer, empty: no layer has a window
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    post_norms: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    attn_scale: float | None = None  # None: 1/sqrt(HD)

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.attn_scale is None else self.attn_scale

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """`[out, in]` of the seven linears of a layer, by their path below `model.layers.N.`, in forward order."""
        c, i = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, c),
            "self_attn.k_proj": (kv, c),
            "self_attn.v_proj": (kv, c),
            "self_attn.o_proj": (c, q),
            "mlp.gate_proj": (i, c),
            "mlp.up_proj": (i, c),
            "mlp.down_proj": (c, i),
        }

    def norm_shapes(self) -> dict[str, tuple[int]]:
        """Shapes of the norms of a layer, by their path below `model.layers.N.`."""
        shapes = {"input_layernorm": (self.hidden_size,), "post_attention_layernorm": (self.hidden_size,)}
        if self.sub_norms:
            shapes["self_attn.attn_sub_norm"] = (self.num_attention_heads * self.head_dim,)
            shapes["mlp.ffn_sub_norm"] = (self.intermediate_size,)
        return shapes


def check_sizes(config: ModelConfig, source: str) -> None:
    """Raise UserError, naming the key, unless the sizes make a model that the kernels can run."""
    for key, limit in SIZE_LIMITS.items():
        value = getattr(config, key)
        if type(value) is not int or not 1 <= value <= limit:
            raise UserError(f"{source}: {key} is {value!r}; wanted a whole number from 1 to {limit}.")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UserError(f"{source}: num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}.")
    if config.head_dim % 2:
        raise UserError(f"{source}: head_dim is {config.head_dim}; wanted an even number, RoPE turns pairs.")
    if not 0 < config.rms_norm_eps < 1:
        raise UserError(f"{source}: rms_norm_eps is {config.rms_norm_eps!r}; wanted a number between 0 and 1.")
    ids = {"bos_token_id": (config.bos_token_id,), "eos_token_id": config.eos_token_ids}
    for key, values in ids.items():
        for value in values:
            if value is not None and not 0 <= value < config.vocab_size:
                raise UserError(f"{source}: {key} {value} is outside the vocabulary of {config.vocab_size}.")
    factors = config.rope.freq_factors
    if factors is not None and len(factors) != config.head_dim // 2:
        raise UserError(f"{source}: {len(factors)} RoPE frequency factors; head_dim wants {config.head_dim // 2}.")
    if not 1 <= config.rope.theta < math.inf:
        raise UserError(f"{source}: rope_theta is {config.rope.theta!r}; wanted a finite number of at least 1.")
