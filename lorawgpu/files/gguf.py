"""A strict reader of GGUF headers; block types and dequantization come from the `gguf` library.

The library's own reader trusts counts and lengths: a hostile array length makes it allocate without bound, which no
exception handler can stop. Here every count is checked against the remaining bytes before it is used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief, file_size, map_bytes

STRING, ARRAY = 8, 9
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8",
           12: "<f8"}  # fmt: skip
MAX_DIMS = 4
# Type numbers that bitnet.cpp chose; to the GGUF project, 39 is MXFP4 and the others are free.
I2_S, I2_S_NUMBER = "I2_S", 36
BITNET_TYPES = {37: "i8_s", 38: "TL1", 39: "TL2"}
BITNET_ADVICE = (
    "its layout depends on the machine that it was made for; use the model's Hugging Face folder, or a GGUF of TQ1_0, "
    "TQ2_0 or i2_s, instead"
)
I2_S_END = 32  # bytes after the codes, which begin with the scale
PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
CHUNK_ELEMENTS = 1 << 22  # values dequantized at a time


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: name of its block type, shape with the fastest axis last, absolute offset of its bytes."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """The header of a GGUF file, fully checked: `metadata` by key, `tensors` by name.

    Numeric arrays are NumPy arrays, string arrays lists. `kinds`: the value types of the metadata, (type, type of an
    array's items or None), to write it again. UserError for a missing, truncated, malformed or unsupported file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        size = file_size(self.path)
        if size < 24:
            raise UserError(f"{path}: {size} bytes, too short for a GGUF file; download it again.")
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, size, str(path))
            tensor_count, key_count = _preamble(cursor)
            self.metadata, self.kinds = _metadata(cursor, key_count)
            bitnet = str(self.metadata.get("general.architecture")).startswith("bitnet")
            infos = [_tensor_info(cursor, bitnet) for _ in range(cursor.count(tensor_count, 32, "tensors"))]
            alignment = self.metadata.get("general.alignment", 32)
            if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
                raise UserError(f"{path}: general.alignment is {brief(alignment)}; wanted a power of two from 8.")
            base = cursor.position + -cursor.position % alignment
        self.tensors = _place(infos, base, alignment, size, str(path))

    def raw(self, name: str) -> np.ndarray:
        """Tensor `name` as stored, uint8 [rows, bytes of a row]; i2_s, which is not stored by rows, [1, bytes]."""
        info = self.tensors[name]
        rows = 1 if info.type == I2_S else math.prod(info.shape[:-1])
        return map_bytes(self.path, info.offset, info.nbytes).reshape(rows, -1)

    def read(self, name: str, rows: np.ndarray | None = None) -> tuple[np.ndarray, str]:
        """Tensor `name` and its type: F32, F16 and BF16 (as uint16) as stored, block types dequantized to F32.

        rows: those rows of a matrix alone. UserError for a block type that the `gguf` library cannot dequantize.
        """
        info = self.tensors[name]
        if info.type == I2_S:
            raise UserError(f"{self.path}: {name} is of type i2_s, which is supported for linear layers only.")
        raw = self.raw(name)
        shape = info.shape
        if rows is not None:
            raw, shape = raw[rows], (len(rows), *shape[1:])
        if info.type in PLAIN:
            return raw.view(PLAIN[info.type]).reshape(shape), info.type
        values = np.empty((len(raw), info.shape[-1]), np.float32)
        step = max(1, CHUNK_ELEMENTS // info.shape[-1])
        for start in range(0, len(raw), step):
            values[start : start + step] = _dequantize(raw[start : start + step], info.type, f"{self.path}: {name}")
        return values.reshape(shape), "F32"


def _dequantize(raw: np.ndarray, type_name: str, where: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    try:
        with np.errstate(all="ignore"):  # no warnings for garbage scales
            return quants.dequantize(raw, GGMLQuantizationType[type_name])
    except NotImplementedError:
        raise UserError(f"{where}: block type {type_name} is not supported; use another quantization.") from None


class _Cursor:
    """Reads forward through the mapped file; every read is checked against its end."""

    def __init__(self, data: mmap.mmap, size: int, source: str) -> None:
        self.data, self.size, self.source, self.position = data, size, source, 0

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.size - self.position:
            raise UserError(
                f"{self.source}: header wants {nbytes} bytes at {self.position}, but the file ends at {self.size}; "
                "it is damaged or truncated, download it again."
            )
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def peek_u32(self) -> int:
        value = self.u32()
        self.position -= 4
        return value

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{self.source}: {brief(raw[:80])} before byte {self.position} is not UTF-8.") from None

    def count(self, count: int, least: int, what: str) -> int:
        """`count`, if so many items of at least `least` bytes each fit into the rest of the file."""
        if count * least > self.size - self.position:
            raise UserError(
                f"{self.source}: {count} {what} cannot fit into {self.size} bytes; it is damaged, download it again."
            )
        return count


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    if cursor.take(4) != b"GGUF":
        raise UserError(f"{cursor.source}: not a GGUF file (it does not start with GGUF).")
    version = cursor.u32()
    if version not in (2, 3):
        raise UserError(f"{cursor.source}: GGUF version {version} is not supported; wanted 2 or 3, little-endian.")
    return cursor.u64(), cursor.u64()


def _metadata(cursor: _Cursor, key_count: int) -> tuple[dict[str, object], dict[str, tuple[int, int | None]]]:
    metadata, kinds = {}, {}
    for _ in range(cursor.count(key_count, 13, "metadata keys")):
        key = cursor.string()
        if key in metadata:
            raise UserError(f"{cursor.source}: metadata key {brief(key)} appears twice.")
        kind = cursor.u32()
        item = cursor.peek_u32() if kind == ARRAY else None
        metadata[key], kinds[key] = _value(cursor, kind, key), (kind, item)
    return metadata, kinds


def _value(cursor: _Cursor, kind: int, key: str) -> object:
    if kind == STRING:
        return cursor.string()
    if kind == ARRAY:
        item, count = cursor.u32(), cursor.u64()
        if item == STRING:
            return [cursor.string() for _ in range(cursor.count(count, 8, f"strings of {brief(key)}"))]
        dtype = _scalar(cursor, item, key)
        return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)
    dtype = _scalar(cursor, kind, key)
    return np.frombuffer(cursor.take(dtype.itemsize), dtype)[0].item()


def _scalar(cursor: _Cursor, kind: int, key: str) -> np.dtype:
    if kind not in SCALARS:
        raise UserError(f"{cursor.source}: metadata key {brief(key)} has value type {kind}, which is not supported.")
    return np.dtype(SCALARS[kind])


def _tensor_info(cursor: _Cursor, bitnet: bool) -> tuple[str, TensorInfo]:
    """Name and info, its offset still relative to the data section. bitnet: type numbers are those of bitnet.cpp."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    where = f"{cursor.source}: tensor {brief(name)}"
    dims = cursor.u32()
    if not 1 <= dims <= MAX_DIMS:
        raise UserError(f"{where} has {dims} dimensions; wanted 1 to {MAX_DIMS}.")
    shape = tuple(cursor.u64() for _ in range(dims))[::-1]
    kind, offset = cursor.u32(), cursor.u64()
    if kind in BITNET_TYPES and (bitnet or kind not in set(GGMLQuantizationType)):
        raise UserError(f"{where} has bitnet.cpp's type {BITNET_TYPES[kind]}, which is not supported: {BITNET_ADVICE}.")
    elements = math.prod(shape)
    if kind == I2_S_NUMBER:
        if not elements or elements % 4 or dims != 2:
            raise UserError(f"{where} has shape {list(shape)}; wanted a matrix of whole bytes of four i2_s codes.")
        return name, TensorInfo(I2_S, shape, offset, elements // 4 + I2_S_END)
    if kind not in set(GGMLQuantizationType):
        raise UserError(f"{where} has unknown type number {kind}; update the gguf package, or use another file.")
    block, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not elements or shape[-1] % block:
        raise UserError(f"{where} has shape {list(shape)}; wanted rows of multiples of {block} values.")
    return name, TensorInfo(GGMLQuantizationType(kind).name, shape, offset, elements // block * type_size)


def _place(
    infos: list[tuple[str, TensorInfo]], base: int, alignment: int, size: int, source: str
) -> dict[str, TensorInfo]:
    """Tensors with absolute offsets. They must follow one another, padded to the alignment, as the format says."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, info in sorted(infos, key=lambda item: item[1].offset):
        if name in tensors:
            raise UserError(f"{source}: tensor {brief(name)} appears twice.")
        if info.offset != end:
            fault = "overlaps the previous tensor" if info.offset < end else "leaves a gap before it"
            tl2 = any(info.type == "MXFP4" for _, info in infos)
            why = (
                f"if its type 39 is bitnet.cpp's TL2, it is not supported: {BITNET_ADVICE}" if tl2 else "it is damaged"
            )
            raise UserError(f"{source}: tensor {brief(name)} {fault} (at {info.offset}, wanted {end}); {why}.")
        if base + info.offset + info.nbytes > size:
            raise UserError(
                f"{source}: tensor {brief(name)} ends at byte {base + info.offset + info.nbytes}, but the file at "
                f"{size}; it is truncated, download it again."
            )
        tensors[name] = TensorInfo(info.type, info.shape, base + info.offset, info.nbytes)
        end = info.offset + info.nbytes
        end += -end % alignment
    return tensors
