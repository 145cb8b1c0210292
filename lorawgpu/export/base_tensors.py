"""Every tensor of a base model as a Hugging Face folder has it, one at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lorawgpu.export.source import ExportSource
from lorawgpu.export.weights_file import Raw, stored_tensor
from lorawgpu.families.hf import TEXT_PREFIX
from lorawgpu.families.registry import FAMILIES
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.tensors import Dense, is_linear, narrow


@dataclass(frozen=True)
class BaseTensor:
    """`name`: in the folder; `module`: the path of the module whose weight it is, or "" for anything else."""

    name: str
    module: str
    tensor: Dense | Raw


def base_tensors(source: ExportSource) -> Iterator[BaseTensor]:
    """A folder's tensors keep their names and bytes, those of other towers too; a ternary base is dequantized to bf16,
    and the quantized matrices of a folder to float32.

    A GGUF base becomes a text model, with the weights of norms as Hugging Face's class of the family stores them.
    """
    if source.config.ternary:
        for name in source.checkpoint.keys():
            yield BaseTensor(name, _module(name), _dequantized(source, name))
    elif isinstance(source.base, GgufCheckpoint):
        for name in source.checkpoint.keys():
            stored = name.replace(source.config.prefix, TEXT_PREFIX, 1)
            yield BaseTensor(stored, _module(name), _from_gguf(source, name))
    elif source.checkpoint.quantized:
        for name in source.checkpoint.keys():
            yield BaseTensor(name, _module(name), source.checkpoint.dense(name))
        for name in source.base.outside():
            file, stored = source.base.stored()[name]
            yield BaseTensor(stored, "", stored_tensor(file, stored))
    else:
        for name, (file, stored) in source.base.stored().items():
            yield BaseTensor(stored, _module(name), stored_tensor(file, stored))


def _module(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith(".weight") else ""


def _dequantized(source: ExportSource, name: str) -> Dense:
    if not is_linear(name):
        return source.checkpoint.dense(name)
    ternary = source.checkpoint.ternary(name)
    return narrow(ternary.values().astype(np.float32) * np.float32(ternary.scale), "bf16")


def _from_gguf(source: ExportSource, name: str) -> Dense:
    """llama.cpp's converters add the offset of norms to their weights."""
    offset = FAMILIES[source.config.family].norm_offset
    tensor = source.checkpoint.dense(name)
    if not offset or not name.endswith("norm.weight"):
        return tensor
    return Dense(tensor.float32() - np.float32(offset), "f32")
