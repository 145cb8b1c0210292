"""A strict reader of safetensors files.

The library cannot load BF16 into NumPy, so the bytes are read here. Every number in the header is checked against the
file before it is used: a hostile file ends in a UserError, never in a huge allocation or a bad read.
Format: u64 header length, JSON header (`name: {dtype, shape, data_offsets}`), data without gaps or overlaps.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief, file_size, map_bytes, parse_json

MAX_HEADER = 25_000_000  # bytes; the Hugging Face hub's own limit
MAX_DIMS = 8
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
NUMPY_TYPES = {"U8": np.uint8, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # the ones we read


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype, shape, absolute offset and size of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """The header of a file, fully checked; tensors are memory-mapped on request.

    UserError for a missing, truncated or malformed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.entries = read_header(self.path)

    def read(self, name: str) -> np.ndarray:
        """The stored values of tensor `name`, read-only, BF16 as uint16. UserError for an unsupported dtype."""
        entry = self.entries[name]
        if entry.dtype not in NUMPY_TYPES:
            supported = ", ".join(NUMPY_TYPES)
            raise UserError(f"{self.path}: {name} has unsupported dtype {entry.dtype}; wanted one of {supported}.")
        dtype, raw = np.dtype(NUMPY_TYPES[entry.dtype]), self.raw(name)
        if entry.offset % dtype.itemsize:  # the format does not guarantee alignment
            raw = raw.copy()
        return raw.view(dtype.newbyteorder("<")).reshape(entry.shape)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of tensor `name`, of any dtype, read-only uint8."""
        entry = self.entries[name]
        return map_bytes(self.path, entry.offset, entry.nbytes) if entry.nbytes else np.empty(0, np.uint8)


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of a safetensors file by name, in order of their offsets. UserError if it is malformed."""
    size = file_size(path)
    if size < 8:
        raise UserError(f"{path}: {size} bytes, too short for a safetensors file; copy or download it again.")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER, size - 8):
            raise UserError(
                f"{path}: header of {length} bytes (at most {MAX_HEADER}) in a file of {size}; "
                "not a safetensors file, or truncated."
            )
        text = file.read(length)
    header = parse_json(text, f"{path}, header")
    if not isinstance(header, dict):
        raise UserError(f"{path}: header is {type(header).__name__}; wanted an object of tensors.")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null if there are none
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise UserError(f"{path}: __metadata__ is not an object of strings.")
    entries = {name: _entry(path, name, info, 8 + length) for name, info in header.items()}
    return _check_coverage(path, entries, 8 + length, size)


def _entry(path: Path, name: str, info: object, base: int) -> Entry:
    where = f"{path}: tensor {brief(name)}"
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where}: its header entry needs exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise UserError(f"{where}: unknown dtype {brief(dtype)}; wanted one of {', '.join(ITEM_BITS)}.")
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise UserError(f"{where}: shape {brief(shape)} is not a list of at most {MAX_DIMS} sizes.")
    if not _sizes(offsets) or len(offsets) != 2:
        raise UserError(f"{where}: data_offsets {brief(offsets)} is not a start and an end.")
    if math.prod(max(size, 1) for size in shape) >= 1 << 56:  # NumPy rejects such a shape, even for an empty tensor
        raise UserError(f"{where}: shape {brief(shape)} is too large for any memory.")
    nbytes = math.prod(shape) * ITEM_BITS[dtype] // 8
    if offsets[1] - offsets[0] != nbytes:
        raise UserError(f"{where}: {dtype} {shape} needs {nbytes} bytes, but data_offsets are {offsets}.")
    return Entry(dtype, tuple(shape), base + offsets[0], nbytes)


def _sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_coverage(path: Path, entries: dict[str, Entry], base: int, size: int) -> dict[str, Entry]:
    """The entries in order, if they tile the data exactly: overlaps or gaps mean that the file is broken."""
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = base
    for name, entry in ordered.items():
        if entry.offset != end:
            fault = "overlaps the previous tensor" if entry.offset < end else "leaves a gap before it"
            raise UserError(f"{path}: tensor {brief(name)} at byte {entry.offset} {fault} (wanted byte {end}).")
        end += entry.nbytes
    if end != size:
        fault = "truncated" if end > size else "bytes after the last tensor"
        raise UserError(f"{path}: tensors end at byte {end}, the file at {size}: {fault}; download it again.")
    return ordered
