"""Writing a GGUF file tensor by tensor: the header first, from names, types and shapes; then the data as it comes."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

ALIGNMENT = 32


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written. `type`: GGML's name; `shape`: with the fastest axis last."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // block * size


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[tuple[TensorPlan, Iterator[np.ndarray]]],
    plans: list[TensorPlan],
    kinds: Mapping[str, tuple[int, int | None]] | None = None,
) -> None:
    """Write a file. `tensors` yields each of `plans`, in order, with its bytes in pieces: arrays of any type.

    metadata: whole keys; the types of values follow Python's (float: float32; int: uint32, and in arrays int32, which
    llama.cpp wants of the types of tokens) unless `kinds` gives them.
    `general.architecture` is one of them. OSError if the disk fails, naming the file.
    """
    writer = gguf.GGUFWriter(None, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value, (kinds or {}).get(key))
    for plan in plans:
        kind = GGMLQuantizationType[plan.type]
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    (file,) = writer.fout
    try:
        file.write(bytes(-file.tell() % ALIGNMENT))
        for plan, (given, pieces) in zip(plans, tensors, strict=True):
            if given != plan:
                raise ValueError(f"wanted {plan.name}, got {given.name}")
            end = file.tell() + plan.nbytes
            for piece in pieces:
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if file.tell() != end:
                raise ValueError(f"{plan.name}: {plan.nbytes} bytes planned, {file.tell() - end:+d}")
            file.write(bytes(-plan.nbytes % ALIGNMENT))
        file.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        file.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any, kind: tuple[int, int | None] | None) -> None:
    if kind is None:
        items = isinstance(value, list)
        first = value[0] if items else value
        kind = (GGUFValueType.ARRAY, _kind_of(first, True)) if items else (_kind_of(first), None)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if value == []:  # the library writes no empty arrays; they say nothing
        return
    outer, inner = kind
    writer.add_key_value(key, value, GGUFValueType(outer), None if inner is None else GGUFValueType(inner))


def _kind_of(value: bool | int | float | str, in_array: bool = False) -> int:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, str):
        return GGUFValueType.STRING
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    return GGUFValueType.INT32 if in_array or value < 0 else GGUFValueType.UINT32
