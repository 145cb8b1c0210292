"""A GGUF file as a checkpoint: Hugging Face's names and row order. Blocks that have a store stay blocks."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.family import Family
from lorawgpu.families.gguf import ROPE_TENSORS, ActivationUnknown, from_gguf
from lorawgpu.families.registry import FAMILIES
from lorawgpu.files.dtypes import DENSE_TYPES
from lorawgpu.files.gguf import I2_S, GgufFile, TensorInfo
from lorawgpu.ops.stores import GGML, STORES
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.weights.i2_s import LAYOUTS, read_i2_s
from lorawgpu.weights.options import HIDDEN_ACT, I2_S_LAYOUT, ModelOptions, how_to_say
from lorawgpu.weights.tensors import (
    HEAD,
    PER_LAYER_TABLE,
    SCALAR,
    Blocks,
    Checkpoint,
    Dense,
    Ternary,
    check_names,
    expected_tensors,
    is_linear,
    pack_codes,
    pack_exact,
)

TERNARY_TYPES = ("TQ1_0", "TQ2_0", I2_S)
BLOCK_STORES = {store.name for store in GGML}
MISTRAL_WINDOW = 4096  # tokens, of version 0.1
NAMES_OF_MODELS = r"general\.(name|basename|finetune|base_model\.\d+\.(name|repo_url))"
TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


class GgufCheckpoint(Checkpoint):
    """The checkpoint in the file `path`; `name` is what the user called it."""

    def __init__(self, path: Path, name: str, options: ModelOptions | None = None) -> None:
        self.path, self.name, self.options = path, name, dict(options or {})
        self.file = GgufFile(path)
        self.config = self._config()
        self._family = FAMILIES[self.config.family]
        names = [name for name in self.file.tensors if name not in ROPE_TENSORS]
        self._gguf_names = {hf_name(name, self._family, self.config): name for name in names}
        shapes = expected_tensors(self.config)
        if self.config.ternary is None and self._of_ternary_types(shapes):
            self.config = replace(self.config, ternary="multiply")
        self._check(shapes)

    def _config(self) -> ModelConfig:
        try:
            return from_gguf(self.file, self.options.get(HIDDEN_ACT))
        except ActivationUnknown as error:
            raise UserError(
                f"{error}, and models of this architecture differ in it (Microsoft's BitNet b1.58 2B4T: relu2; "
                f"1bitLLM's: silu); {how_to_say(HIDDEN_ACT)}."
            ) from None

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check names and shapes. The linear layers of a ternary model may have scales of their own."""
        if self.config.ternary:
            scales = {_scale_of(name): (1,) for name in shapes if is_linear(name)}
            shapes = shapes | {name: shape for name, shape in scales.items() if name in self._gguf_names}
        check_names(set(self._gguf_names), set(shapes), self.config, str(self.path))
        for name, shape in shapes.items():
            found = self._info(name).shape
            if found != shape:
                raise UserError(f"{self.path}: {name} has shape {list(found)}; the metadata wants {list(shape)}.")

    @property
    def has_i2_s(self) -> bool:
        return any(info.type == I2_S for info in self.file.tensors.values())

    def readings(self) -> "dict[str, GgufCheckpoint]":
        if not self.has_i2_s or I2_S_LAYOUT in self.options:
            return {}
        return {name: GgufCheckpoint(self.path, self.name, self.options | {I2_S_LAYOUT: name}) for name in LAYOUTS}

    @property
    def arch(self) -> str:
        return self.file.metadata["general.architecture"]

    @property
    def quantized(self) -> bool:
        """Whether any tensor is stored in quantized blocks."""
        return any(info.type not in DENSE_TYPES for info in self.file.tensors.values())

    @property
    def may_lack_a_window(self) -> bool:
        """Whether it is a Mistral as arch `llama`, which has no key for the sliding window of version 0.1."""
        metadata, layers = self.file.metadata, self.config.layers
        if metadata.get("general.architecture") != "llama" or any(layer.attention.window for layer in layers):
            return False
        texts = [str(value) for key, value in metadata.items() if re.fullmatch(NAMES_OF_MODELS, key)]
        return (
            re.search(r"mistral|zephyr-7b|openhermes-2", " ".join([*texts, self.path.name]), re.IGNORECASE) is not None
        )

    @property
    def unknown_splits(self) -> bool:
        """Whether the file does not say how its byte-level tokenizer splits text."""
        metadata = self.file.metadata
        return metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata

    def _of_ternary_types(self, names) -> bool:
        """Whether the linear layers are ternary: such a model quantizes activations too. UserError if only some are."""
        types = self.file.tensors
        linear = [name for name in names if is_linear(name) and name in self._gguf_names]
        ternary = [name for name in linear if types[self._gguf_names[name]].type in TERNARY_TYPES]
        if ternary and len(ternary) < len(linear):
            other = next(name for name in linear if name not in ternary)
            raise UserError(
                f"{self.path}: {ternary[0]} is ternary ({'/'.join(TERNARY_TYPES)}), {other} is not; models of both are "
                "not supported."
            )
        return bool(ternary)

    def widened(self) -> dict[str, list[str]]:
        """The tensors that become float32, by their block type, because it has no store."""
        found = {}
        for name in self.keys():
            if name.endswith(PER_LAYER_TABLE):
                continue  # it stays on disk
            kind = self._info(name).type
            if kind not in DENSE_TYPES and len(self._info(name).shape) > 1 and self.store(name) == "f32":
                found.setdefault(kind, []).append(name)
        return found

    def settings(self) -> bytes:
        metadata = self.file.metadata
        model = [(key, metadata[key]) for key in sorted(metadata) if not key.startswith("tokenizer.")]
        return repr(model + sorted(self.options.items())).encode()

    def dense(self, name: str) -> Dense:
        if self._info(name).type == I2_S and self._is_ternary(name):
            ternary = self.ternary(name)
            return Dense(ternary.values() * np.float32(ternary.scale), "f32")
        data, kind = self.file.read(self._gguf_names[name])
        return Dense(self._in_our_order(name, data), DENSE_TYPES[kind])

    def gather(self, name: str, ids: np.ndarray) -> Dense:
        data, kind = self.file.read(self._gguf_names[name], ids)
        return Dense(data, DENSE_TYPES[kind])

    def matrix(self, name: str) -> Dense | Blocks:
        if self._is_ternary(name):
            return self.ternary(name)
        if (store := self.store(name)) not in BLOCK_STORES:
            return self.dense(name)
        raw = self.file.raw(self._gguf_names[name])
        return Blocks(self._in_our_order(name, raw), store, f"{self.path}: {name}")

    def store(self, name: str) -> str:
        if self._is_ternary(name):
            return super().store(name)
        own = self._info(name).type.lower()  # stores have the names of GGML's types
        return own if own in STORES else "f32"

    def _info(self, name: str) -> TensorInfo:
        return self.file.tensors[self._gguf_names[name]]

    def _in_our_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        heads = permuted_heads(name.rsplit(".", 1)[0], self.config, self._family)
        return unpermute(rows, heads) if heads else rows

    def ternary(self, name: str) -> Ternary:
        """UserError if its blocks have different scales, so that it is not one ternary matrix, or if its layout is not
        known."""
        where, out = f"{self.path}: {name}", self._info(name).shape[0]
        if self._info(name).type == I2_S:
            packed, scale = self._i2_s(name, where)
        else:
            values = self.dense(name).float32()
            scale = np.float32(np.abs(values).max())
            if not np.isfinite(scale) or not np.isin(values, (-scale, 0, scale)).all():
                raise UserError(f"{where}: its blocks have different scales; wanted one for the matrix, -w, 0 and w.")
            packed = pack_exact(Dense(values / (scale or np.float32(1)), "f32"), where)
        return Ternary(packed, out, float(np.float32(scale) * self._own_scale(name)))

    def _i2_s(self, name: str, where: str) -> tuple[np.ndarray, float]:
        if I2_S_LAYOUT not in self.options:
            raise UserError(f"{where} is of type i2_s, whose layout the file does not say; {how_to_say(I2_S_LAYOUT)}.")
        raw = self.file.raw(self._gguf_names[name])[0]
        codes, scale = read_i2_s(raw, self._info(name).shape, self.options[I2_S_LAYOUT], where)
        return pack_codes(self._in_our_order(name, codes)), scale

    def _own_scale(self, name: str) -> np.float32:
        """What runtimes multiply the products of a linear layer by."""
        if _scale_of(name) not in self._gguf_names:
            return np.float32(1)
        scale = self.file.read(self._gguf_names[_scale_of(name)])[0].reshape(-1)[0]
        if not np.isfinite(scale):
            raise UserError(f"{self.path}: {_scale_of(name)} is {scale}; the file is damaged.")
        return np.float32(scale)

    def tokenizer(self) -> GuardedTokenizer:
        return GuardedTokenizer.from_gguf(self.file.path, self.config.vocab_size)


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def lost_window(checkpoint: Checkpoint, longest: int) -> str:
    """What to tell a user whose sequences are longer than a window that a GGUF of Mistral does not hold, or ""."""
    checkpoint = checkpoint.stored_as
    if not isinstance(checkpoint, GgufCheckpoint) or longest <= MISTRAL_WINDOW or not checkpoint.may_lack_a_window:
        return ""
    return (
        f"{checkpoint.name} seems to be a Mistral 7B, and a GGUF does not hold its sliding window: sequences of more "
        f"than {MISTRAL_WINDOW:,} tokens (the longest has {longest:,}) attend to all of them, which version 0.1 does "
        f"not; for that one, use its Hugging Face folder, or a sequence_len of {MISTRAL_WINDOW}"
    )


def hf_name(name: str, family: Family, config: ModelConfig) -> str:
    """Hugging Face's name for a GGUF tensor. An unknown tensor gets a name that no model has."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        layer, part, kind = match.groups()
        path = family.gguf.layer_names.get(part, part)
        return f"{config.layer_path(int(layer))}.{path}" + ("" if path == SCALAR else f".{kind}")
    if name == "output.weight":
        return HEAD
    part = name.removesuffix(".weight")
    part = (TOP_NAMES | dict(family.gguf.top_names)).get(part, part)
    return f"{config.prefix}{part}.weight"


def permuted_heads(module: str, config: ModelConfig, family: Family) -> int:
    """Heads of a linear layer (such as "model.layers.0.self_attn.q_proj") whose rows GGUF permutes; otherwise 0."""
    path = module.split(".")
    if not family.gguf.permuted or path[-1] not in ("q_proj", "k_proj"):
        return 0
    attention = config.layers[int(path[-3])].attention
    return attention.heads if path[-1] == "q_proj" else attention.kv_heads


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k `[heads*HD, in]`, or its bias, from interleaved RoPE, llama.cpp's, to half-split."""
    rows, *width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, *width).swapaxes(1, 2).reshape(rows, *width)
