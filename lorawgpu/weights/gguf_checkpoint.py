"""A GGUF file as a checkpoint: Hugging Face names and row order, blocks dequantised to float32."""

import re
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.families.gguf import ROPE_FREQS, from_gguf
from lorawgpu.files.dtypes import DENSE_TYPES
from lorawgpu.files.gguf import GgufFile
from lorawgpu.tokenizer.hf import Tokenizer
from lorawgpu.weights.tensors import EMBEDDING, HEAD, Checkpoint, Dense, Ternary, check_names, expected_tensors

TOP_NAMES = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight", "output": HEAD}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint(Checkpoint):
    """The checkpoint in the file `path`; `name` is what the user called it."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._file = GgufFile(path)
        self.config = from_gguf(self._file)
        self._gguf_names = {hf_name(name): name for name in self._file.tensors if name != ROPE_FREQS}
        shapes = expected_tensors(self.config)
        check_names(set(self._gguf_names), set(shapes), str(path))
        for name, shape in shapes.items():
            found = self._file.tensors[self._gguf_names[name]].shape
            if found != shape:
                raise UserError(f"{path}: {name} has shape {list(found)}; the metadata wants {list(shape)}.")

    @property
    def quantised(self) -> bool:
        """Whether any tensor is stored in blocks, which `dense` decodes to float32."""
        return any(info.type not in DENSE_TYPES for info in self._file.tensors.values())

    def dense(self, name: str) -> Dense:
        data, kind = self._file.read(self._gguf_names[name])
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        for suffix, count in heads.items():
            if name.endswith(f"{suffix}.weight"):
                data = unpermute(data, count)
        return Dense(data, DENSE_TYPES[kind])

    def store(self, name: str) -> str:
        return DENSE_TYPES.get(self._file.tensors[self._gguf_names[name]].type, "f32")

    def ternary(self, name: str) -> Ternary:
        raise UserError(f"{self.path}: {name} is not ternary; GGUF models are read as dense ones.")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_gguf(self._file)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor of arch `llama`; an unknown one keeps a name that no model has."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES.get(part, part)}.{kind}"
    return TOP_NAMES.get(name.removesuffix(".weight"), f"model.{name}")


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k `[heads*HD, in]` from llama.cpp's interleaved RoPE order back to the half-split order."""
    out, width = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)
