"""The interface to a base model on disk, which reads one tensor at a time and keeps none in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import ALL_MODULES
from lorawgpu.families.modules import EMBEDDING as EMBED_TOKENS
from lorawgpu.files.dtypes import widen

if TYPE_CHECKING:
    from lorawgpu.tokenizer.guarded import GuardedTokenizer
    from lorawgpu.weights.nf4 import Nf4

HEAD = "lm_head.weight"
# Outside of layers, below the config's prefix.
EMBEDDING, NORM = "embed_tokens.weight", "norm.weight"
PER_LAYER_TABLE = "embed_tokens_per_layer.weight"  # [V, layers * P]
PER_LAYER_MODEL = "per_layer_model_projection.weight"  # [layers * P, C]
PER_LAYER_NORM = "per_layer_projection_norm.weight"  # [P]
SCALAR = "layer_scalar"  # below a layer's path
CHUNK_ELEMENTS = 1 << 22  # elements processed at a time, 16 MiB in float32


@dataclass(frozen=True)
class Dense:
    """A tensor exactly as stored: data `[out, in]` or `[C]`; `dtype` is `bf16` (data uint16), `f16` or `f32`."""

    data: np.ndarray
    dtype: str
    where: str = ""  # file and name, of a tensor whose values have to be finite

    def float32(self) -> np.ndarray:
        """The values widened to float32, which is exact."""
        return widen(self.data, self.dtype)


def narrow(values: np.ndarray, dtype: str) -> Dense:
    """float32 rounded to nearest, ties to even."""
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return Dense(values.astype({"f16": np.float16, "f32": np.float32}[dtype]), dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return Dense(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), dtype)


@dataclass(frozen=True)
class Ternary:
    """A BitLinear matrix: `T[out, in]` in {-1, 0, 1}, and one scale `w`.

    `packed` is uint8 `[r, in]`, `r = ceil(out/4)`: bits `2i..2i+1` of byte `[j, c]` hold `T[j + i*r, c] + 1`.
    """

    packed: np.ndarray
    out: int
    scale: float

    def values(self) -> np.ndarray:
        """T, int8 [out, in]."""
        codes = np.concatenate([self.packed >> 2 * i & 3 for i in range(4)])
        return codes[: self.out].astype(np.int8) - np.int8(1)


@dataclass(frozen=True)
class Blocks:
    """A matrix in blocks of GGML: uint8 [out, bytes of a row]. `store`: its name in ops/stores.py; `where`: the file
    and tensor, for messages."""

    data: np.ndarray
    store: str
    where: str


@dataclass(frozen=True)
class Quantizable:
    """A dense matrix that is quantized to `store` (ops/stores.py) as it is uploaded; `where`: for messages."""

    dense: Dense
    store: str
    where: str


class Checkpoint(ABC):
    """A base model on disk: config, tensors by Hugging Face name, and tokenizer."""

    config: ModelConfig
    path: Path
    name: str  # what an adapter records as base_model_name_or_path
    quantized: bool = False  # whether any matrix is stored in blocks
    in_4bit: bool = False  # whether another tool quantized its linear layers to 4 bits, so that load_in_4bit is done
    options: Mapping[str, str] = {}  # what the user said about it (weights/options.py)
    has_i2_s: bool = False  # whether any matrix is of a type whose layout the user may have to say

    own_tokenizer: "GuardedTokenizer | None" = None  # with tokens that the files do not have

    norm_offset = 0.0  # what the model adds to the stored weights of norms

    @property
    def embedding_name(self) -> str:
        return self.config.prefix + EMBEDDING

    @property
    def head_name(self) -> str:
        return self.embedding_name if self.config.tie_word_embeddings else HEAD

    @property
    def stored_as(self) -> "Checkpoint":
        """The checkpoint as the files hold it."""
        return self

    def rows(self, end: str, ids: np.ndarray | None = None) -> np.ndarray:
        """Rows of EMBEDDING or HEAD (families/modules.py) as float32, those of `ids` or all."""
        name = self.embedding_name if end == EMBED_TOKENS else self.head_name
        return (self.dense(name) if ids is None else self.gather(name, ids)).float32()

    def readings(self) -> "dict[str, Checkpoint]":
        """By name, the checkpoints that the files may hold, if they leave that open; none if they do not."""
        return {}

    def norm(self, name: str) -> np.ndarray:
        """The weight of a norm as the model applies it, float32."""
        return self.dense(name).float32() + np.float32(self.norm_offset)

    def gather(self, name: str, ids: np.ndarray) -> Dense:
        """The rows `ids` of a tensor that is too large to be read whole."""
        stored = self.dense(name)
        return Dense(stored.data[ids], stored.dtype)

    def keys(self) -> list[str]:
        """The names of the weights in forward order."""
        return list(expected_tensors(self.config))

    @abstractmethod
    def settings(self) -> bytes:
        """What the files say about the model besides its weights, to tell models apart."""

    @abstractmethod
    def dense(self, name: str) -> Dense:
        """The tensor as stored, GGUF blocks dequantized to float32. UserError if it is not BF16, F16 or F32."""

    def matrix(self, name: str) -> "Dense | Ternary | Blocks | Quantizable | Nf4":
        """The weight of a linear layer, the embedding or the head, in the form in which it is uploaded."""
        return self.ternary(name) if self._is_ternary(name) else self.dense(name)

    def store(self, name: str) -> str:
        """The name of the store (ops/stores.py) for `matrix(name)`."""
        return "ternary" if self._is_ternary(name) else self.dense(name).dtype  # the file is mapped: no data is read

    def _is_ternary(self, name: str) -> bool:
        return self.config.ternary is not None and is_linear(name)

    @abstractmethod
    def ternary(self, name: str) -> Ternary:
        """A linear layer of a model with `config.ternary`. UserError if it is not ternary."""

    @abstractmethod
    def tokenizer(self) -> "GuardedTokenizer":
        """The tokenizer that comes with the weights. UserError if there is none."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every weight of the model, in forward order."""
    c, prefix = config.hidden_size, config.prefix
    shapes: dict[str, tuple[int, ...]] = {prefix + EMBEDDING: (config.vocab_size, c)}
    if width := config.per_layer_input:
        total = width * config.num_hidden_layers
        shapes[prefix + PER_LAYER_TABLE] = (config.per_layer_vocab, total)
        shapes |= {prefix + PER_LAYER_MODEL: (total, c), prefix + PER_LAYER_NORM: (width,)}
    for n, layer in enumerate(config.layers):
        at, weights = config.layer_path(n), layer.norm_shapes() | layer.linear_shapes()
        shapes |= {f"{at}.{name}.weight": shape for name, shape in weights.items()}
        shapes |= {f"{at}.{name}.bias": shape for name, shape in layer.bias_shapes().items()}
        if layer.scalar:
            shapes[f"{at}.{SCALAR}"] = (1,)
    shapes[prefix + NORM] = (c,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, c)
    return shapes


def unused_tensors(config: ModelConfig) -> set[str]:
    """Tensors that files hold although no one reads them: keys and values of layers that share another layer's."""
    readers = [config.layer_path(n) for n, layer in enumerate(config.layers) if layer.attention.shares is not None]
    return {f"{at}.self_attn.{name}.weight" for at in readers for name in ("k_proj", "v_proj", "k_norm", "v_norm")}


def is_linear(name: str) -> bool:
    """Whether a tensor is the weight of one of a layer's linear layers, which are those that are quantized."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in ALL_MODULES


def check_names(found: set[str], wanted: set[str], config: ModelConfig, source: str) -> None:
    """UserError, naming the tensors, if some are missing or not part of the architecture.

    Tensors outside of `config.prefix`, such as those of a vision tower, are not ours to judge.
    """
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UserError(f"{source}: {_listed(sorted(missing))} missing; the config requires them.")
    ours = (config.prefix, "lm_head.")
    # a model with tied embeddings may still store its head
    extra = found - wanted - unused_tensors(config) - {HEAD}
    extra = [n for n in extra if n.startswith(ours) and "rotary_emb" not in n]
    if extra:
        raise UserError(f"{source}: {_listed(sorted(extra))} not part of the config's architecture; not supported.")


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


def packed_rows(out: int) -> int:
    """Rows of the packed form of a matrix of `out` rows."""
    return (out + 3) // 4


def check_packed(packed: np.ndarray, where: str) -> None:
    """UserError if a 2-bit code is 3, which is not a ternary value: the layout must be a different one."""
    step = max(1, CHUNK_ELEMENTS // packed.shape[1])
    for start in range(0, packed.shape[0], step):
        piece = packed[start : start + step]
        if (piece & (piece >> 1) & 0x55).any():
            raise UserError(f"{where}: the packed weight has non-ternary codes; wanted Hugging Face's packed layout.")


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes T + 1, uint8 [out, in], in packed form. Rows past the end are T = 0."""
    rows = packed_rows(len(codes))
    full = np.pad(codes, [(0, 4 * rows - len(codes)), (0, 0)], constant_values=1)
    return sum(full[i * rows : (i + 1) * rows] << np.uint8(2 * i) for i in range(4))


def pack_exact(weight: Dense, where: str) -> np.ndarray:
    """Pack a matrix of values -1, 0 and 1. UserError for any other value."""

    def codes(values: np.ndarray) -> np.ndarray:
        if not np.isin(values, (-1.0, 0.0, 1.0)).all():
            raise UserError(
                f"{where}: has values other than -1, 0 and 1; for master weights, the config needs "
                "quantization_mode online."
            )
        return values

    return _pack(weight, codes)


def quantize_master(weight: Dense, where: str) -> tuple[np.ndarray, float]:
    """BitNet's weight quantizer: `w = max(mean|W|, 1e-5)` over the matrix, `T = clamp(round(W/w), -1, 1)`.

    Returns packed T, and w. Computed in float32 like transformers' WeightQuant, except that the mean is summed in
    float64, so that it does not depend on the order. UserError if a value is not finite.
    """
    total = sum(float(np.abs(values).sum(dtype=np.float64)) for values, _, _ in _quarters(weight))
    if not np.isfinite(total):
        raise UserError(f"{where}: has non-finite values; the file is damaged.")
    scale = np.float32(max(np.float32(total / weight.data.size), np.float32(1e-5)))
    return _pack(weight, lambda values: np.clip(np.rint(values / scale), -1, 1)), float(scale)


def _quarters(weight: Dense) -> Iterator[tuple[np.ndarray, int, int]]:
    """Chunks of rows in float32, each with the first packed row and the bit pair for its codes."""
    out, width = weight.data.shape
    rows = packed_rows(out)
    step = max(1, CHUNK_ELEMENTS // width)
    for i in range(4):
        for j in range(0, rows, step):
            first, last = i * rows + j, min(i * rows + min(j + step, rows), out)
            if first < last:
                yield widen(weight.data[first:last], weight.dtype), j, i


def _pack(weight: Dense, to_ternary: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Pack `to_ternary(W)`. Rows past the end are T = 0."""
    out, width = weight.data.shape
    rows = packed_rows(out)
    packed = np.zeros((rows, width), np.uint8)
    for values, j, i in _quarters(weight):
        packed[j : j + len(values)] |= (to_ternary(values) + 1).astype(np.uint8) << (2 * i)
    for row in range(out, 4 * rows):
        packed[row % rows] |= 1 << (2 * (row // rows))
    return packed
