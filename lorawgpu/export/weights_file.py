"""Write a model's tensors in Hugging Face's layout: one safetensors file, or shards with an index."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorawgpu.files.dtypes import DENSE_TYPES
from lorawgpu.files.safetensors import SafetensorsFile
from lorawgpu.weights.hf_folder import INDEX, SINGLE
from lorawgpu.weights.tensors import Dense

SHARD = 4 << 30  # bytes in host memory at a time; loaders accept any size


@dataclass(frozen=True)
class Raw:
    """A tensor of a dtype that is only copied: uint8 bytes, safetensors' name of the dtype, shape."""

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]


def stored_tensor(file: SafetensorsFile, name: str) -> Dense | Raw:
    """A tensor of a file, memory-mapped."""
    entry = file.entries[name]
    if entry.dtype in DENSE_TYPES:
        return Dense(file.read(name), DENSE_TYPES[entry.dtype])
    return Raw(file.raw(name), entry.dtype, entry.shape)


def write_weights(folder: Path, tensors: Iterator[tuple[str, Dense | Raw]], shard: int = SHARD) -> None:
    """Write tensors as they come, with at most one shard in memory."""
    shards, held, size = [], {}, 0
    for name, tensor in tensors:
        if held and size + tensor.data.nbytes > shard:
            shards.append(_write(folder / f"shard-{len(shards)}", held))
            held, size = {}, 0
        held[name] = tensor
        size += tensor.data.nbytes
    shards.append(_write(folder / f"shard-{len(shards)}", held))
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _write(path: Path, tensors: dict[str, Dense | Raw]) -> list[str]:
    """One file: u64 header length, JSON header padded to 8 bytes, the tensors. Returns their names."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        shape = tensor.shape if isinstance(tensor, Raw) else tensor.data.shape
        header[name] = {"dtype": tensor.dtype.upper(), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.data).data)  # of a mapped tensor, no copy is made
    return list(tensors)


def read_weights(folder: Path) -> dict[str, Dense | Raw]:
    """All tensors of a folder, memory-mapped."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = SafetensorsFile(path)
        found |= {name: stored_tensor(file, name) for name in file.entries}
    return found
