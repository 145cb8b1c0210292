"""A Hugging Face model folder: `config.json`, a safetensors file or shards with an index, a tokenizer."""

import dataclasses
import re
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig, check_sizes
from lorawgpu.families.hf import MULTIMODAL_PREFIX, from_hf
from lorawgpu.families.keys import Keys
from lorawgpu.families.registry import FAMILIES
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.files.untrusted import brief, read_json_object
from lorawgpu.ops.stores import STORES
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.weights.affine import Affine
from lorawgpu.weights.formats import packed_tensors, without_format
from lorawgpu.weights.nf4 import Nf4
from lorawgpu.weights.options import HIDDEN_ACT, ModelOptions
from lorawgpu.weights.tensors import (
    HEAD,
    Checkpoint,
    Dense,
    Ternary,
    check_names,
    check_packed,
    expected_tensors,
    is_linear,
    pack_exact,
    packed_rows,
    quantize_master,
)

MOST_OF_4_BITS = 8  # bits a weight, with scales
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class HfFolder(Checkpoint):
    """The checkpoint in folder `path`; `name` is what the user called it. Reads and checks all headers."""

    def __init__(self, path: Path, name: str, options: ModelOptions | None = None) -> None:
        self.path, self.name, self.options = path, name, dict(options or {})
        self.config = read_config(path, self.options.get(HIDDEN_ACT))
        files = _tensor_files(path)
        self._stored = {module_name(name, self.config.prefix): name for name in files}
        self._files = {name: files[stored] for name, stored in self._stored.items()}
        self.norm_offset = FAMILIES[self.config.family].norm_offset
        self.untied = self.config.tie_word_embeddings and self._has_own_head()
        if self.untied:
            self.config = dataclasses.replace(self.config, tie_word_embeddings=False)
        settings = read_json_object(path / "config.json")
        self._packed = packed_tensors(settings, self.stored(), str(path / "config.json"))
        self._shapes = expected_tensors(self.config)
        self._check()

    def _has_own_head(self) -> bool:
        """Whether the file stores a head that differs from the embedding: transformers does not tie it then.

        A head without an embedding is both.
        """
        if HEAD not in self._files:
            return False
        if self.embedding_name not in self._files:
            for names in (self._files, self._stored):
                names[self.embedding_name] = names.pop(HEAD)
            return False
        if not {self._dtype(HEAD), self._dtype(self.embedding_name)} <= DENSE_TYPES.keys():  # quantized
            head, embedding = (self._files[name].raw(self._stored[name]) for name in (HEAD, self.embedding_name))
            return not np.array_equal(head, embedding)
        head, embedding = (self._files[name].read(self._stored[name]) for name in (HEAD, self.embedding_name))
        if (ours := self._dtype(HEAD)) != (theirs := self._dtype(self.embedding_name)):
            head, embedding = (
                widen(head, DENSE_TYPES.get(ours, ours)),
                widen(embedding, DENSE_TYPES.get(theirs, theirs)),
            )
        return not np.array_equal(head, embedding)

    def outside(self) -> list[str]:
        """The tensors of a multimodal model that do not belong to its text part."""
        if self.config.prefix != MULTIMODAL_PREFIX:
            return []
        return [name for name in self._files if not name.startswith((self.config.prefix, "lm_head."))]

    def settings(self) -> bytes:
        act = self.options.get(HIDDEN_ACT, "")
        return (self.path / "config.json").read_bytes() + act.encode()

    def stored(self) -> dict[str, tuple[SafetensorsFile, str]]:
        """Every tensor in the files, not only the model's: by our name, its file and its name there."""
        return {name: (self._files[name], stored) for name, stored in self._stored.items()}

    @property
    def quantized(self) -> bool:
        """Whether any matrix is stored in a quantized format."""
        return self._packed is not None

    @property
    def in_4bit(self) -> bool:
        stores = {self.store(name) for name in self._shapes if is_linear(name) and self._is_packed(name)}
        return bool(stores) and all(STORES[store].bits < MOST_OF_4_BITS for store in stores)

    def _is_packed(self, name: str) -> bool:
        return self._packed is not None and name in self._packed.names

    def matrix(self, name: str) -> Dense | Ternary | Nf4 | Affine:
        return self._packed.matrix(name) if self._is_packed(name) else super().matrix(name)

    def store(self, name: str) -> str:
        return self._packed.store(name) if self._is_packed(name) else super().store(name)

    def widened(self) -> dict[str, list[str]]:
        """The quantized matrices that become float32, because no store has their values."""
        names = [name for name in self._shapes if self._is_packed(name) and self.store(name) == "f32"]
        return {"quantized weights with F32 scales": names} if names else {}

    def gather(self, name: str, ids: np.ndarray) -> Dense:
        return Dense(self._packed.float32(name, ids), "f32") if self._is_packed(name) else super().gather(name, ids)

    def dense(self, name: str) -> Dense:
        """The tensor as stored, a quantized one as float32. UserError for another dtype."""
        if self._is_packed(name):
            return Dense(self._packed.float32(name), "f32")
        dtype = self._dtype(name)
        if dtype not in DENSE_TYPES:
            raise UserError(f"{self._where(name)} has dtype {dtype}; wanted one of {', '.join(DENSE_TYPES)}.")
        return Dense(self._files[name].read(self._stored[name]), DENSE_TYPES[dtype])

    def ternary(self, name: str) -> Ternary:
        where, out = self._where(name), self._shapes[name][0]
        if self.config.ternary == "online":
            packed, scale = quantize_master(self.dense(name), where)
            return Ternary(packed, out, scale)
        if self._dtype(name) == "U8":
            packed = self._files[name].read(self._stored[name])
            check_packed(packed, where)
        else:
            packed = pack_exact(self.dense(name), where)
        return Ternary(packed, out, self._scale(name))

    def tokenizer(self) -> GuardedTokenizer:
        return GuardedTokenizer.from_hf_folder(self.path, self.config.vocab_size)

    def _scale(self, name: str) -> float:
        """`w` of a matrix: the stored number, or its reciprocal if `config.ternary` is `divide`."""
        stored = self.dense(f"{name}_scale").float32().reshape(-1)
        if stored.size != 1 or not np.isfinite(stored[0]) or stored[0] <= 0:
            values = brief(stored[:4].tolist())
            raise UserError(f"{self._where(name)}: weight_scale is {values}; wanted one positive number.")
        return float(stored[0]) if self.config.ternary == "multiply" else float(np.float32(1) / stored[0])

    def _dtype(self, name: str) -> str:
        return self._files[name].entries[self._stored[name]].dtype

    def _where(self, name: str) -> str:
        return f"{self._files[name].path}: {name}"

    def _check(self) -> None:
        """Check names, shapes and dtypes of all tensors, reading only headers."""
        stored = self.config.ternary in ("multiply", "divide")
        wanted = set(self._shapes)
        if stored:
            wanted |= {f"{name}_scale" for name in self._shapes if is_linear(name)}
        found = set(self._files)
        if self._packed:
            found = (found | self._packed.names) - self._packed.parts
            found -= {name for name in found - wanted if self._is_empty_bias(name)}
        check_names(found, wanted, self.config, str(self.path))
        for name, shape in self._shapes.items():
            if self._is_packed(name):
                self._packed.check(name, shape)
                continue
            entry = self._files[name].entries[self._stored[name]]
            packed = stored and is_linear(name) and entry.dtype == "U8"
            if packed:
                shape = (packed_rows(shape[0]), shape[1])
            elif entry.dtype not in DENSE_TYPES:
                hint = (
                    "; it looks packed, but the config does not declare packed weights" if entry.dtype == "U8" else ""
                )
                raise UserError(
                    f"{self._where(name)} has dtype {entry.dtype}; wanted one of {', '.join(DENSE_TYPES)}{hint}."
                )
            if entry.shape != shape:
                raise UserError(f"{self._where(name)} has shape {list(entry.shape)}; the config wants {list(shape)}.")

    def _is_empty_bias(self, name: str) -> bool:
        """Whether it is one of the zero biases that quantizers add to layers without one."""
        layer = name.removesuffix("bias") + "weight"
        return name.endswith(".bias") and self._is_packed(layer) and not self._packed.read(name).any()


def module_name(name: str, prefix: str) -> str:
    """The name of a tensor by the module that holds it: older multimodal files put language_model first."""
    if prefix == MULTIMODAL_PREFIX:
        name = re.sub(r"^language_model\.(lm_head\.)", r"\1", name)
        name = re.sub(r"^language_model\.model\.", prefix, name)
    return name


def with_activation(settings: dict, act: str) -> dict:
    """A config.json with this activation, that of the text part of a multimodal model."""
    if isinstance(text := settings.get("text_config"), dict):
        return settings | {"text_config": with_activation(text, act)}
    return settings | {"hidden_activation" if "hidden_activation" in settings else "hidden_act": act}


def read_config(folder: Path, act: str | None = None) -> ModelConfig:
    """The config of a model folder, with the additional EOS tokens of `generation_config.json`.

    act: the activation, instead of the file's.
    UserError, saying what the folder seems to be, if it has no config.json.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / ADAPTER_CONFIG_FILE).is_file():
        raise UserError(
            f"{folder}: that is an adapter, not a model; use it as the adapter (--adapter, or `adapter` in a config) "
            f"and its base as the model{_base_of(folder)}."
        )
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; {_ggufs_in(folder)}")
    settings = read_json_object(path)
    if act:
        settings = with_activation(settings, act)
    config = from_hf(without_format(settings), str(path))  # the tensors say which of them are quantized, and how
    generation = folder / "generation_config.json"
    if generation.is_file():
        more = Keys(read_json_object(generation), str(generation)).token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))
        check_sizes(config, str(generation))
    return config


def _ggufs_in(folder: Path) -> str:
    """What to name instead of a folder without a config."""
    files = sorted(path for path in folder.glob("*.gguf") if "mmproj" not in path.name)
    if not files:
        return "wanted a Hugging Face model folder or a .gguf file."
    if len(files) == 1:
        return f"the model is a GGUF file in it: name that file, {files[0]}"
    return f"it holds {len(files)} GGUF files: name one of them, such as {files[0]}"


def _base_of(folder: Path) -> str:
    """The base model that an adapter's config names, in parentheses."""
    settings = read_json_object(folder / ADAPTER_CONFIG_FILE)
    base = settings.get("base_model_name_or_path") or settings.get("model")  # PEFT's key, mlx-lm's key
    return f" ({brief(base)})" if base else ""


def _tensor_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor."""
    if (folder / SINGLE).is_file():
        file = SafetensorsFile(folder / SINGLE)
        return {name: file for name in file.entries}
    index = folder / INDEX
    if not index.is_file():
        raise UserError(f"{folder}: no {SINGLE} or {INDEX}; pickled weights (.bin, .pt) are not supported.")
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: weight_map is missing; wanted an object of tensor names and files.")
    shards = {shard: _shard(folder, index, shard) for shard in dict.fromkeys(map(_shard_name, weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard].entries:
            raise UserError(f"{index}: tensor {brief(name)} is not in {shard} as this index says.")
    return {name: shards[shard] for name, shard in weight_map.items()}


def _shard_name(value: object) -> object:
    """A hashable stand-in for values that are not strings, for the error that follows."""
    return value if isinstance(value, str) else repr(value)


def _shard(folder: Path, index: Path, shard: str) -> SafetensorsFile:
    """The shard, whose name must be a plain file name: a path in the index could point anywhere on the disk."""
    plain = shard == Path(shard).name and "\\" not in shard and ":" not in shard
    if not plain or not shard.endswith(".safetensors"):
        raise UserError(f"{index}: shard {brief(shard)} is not the name of a .safetensors file in this folder.")
    return SafetensorsFile(folder / shard)
