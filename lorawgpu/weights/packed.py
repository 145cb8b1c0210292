"""What the formats share in which other tools quantize the matrices of a Hugging Face folder."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.safetensors import Entry, SafetensorsFile
from lorawgpu.files.untrusted import brief
from lorawgpu.weights.affine import GROUPS, Affine, Rows
from lorawgpu.weights.tensors import Dense

INSTEAD = "use the dense model (load_in_4bit: true quantizes it as it is loaded), or a GGUF"
BITS = (4, 8)
Files = Mapping[str, tuple[SafetensorsFile, str]]  # by our name of a tensor, its file and its name there
INTEGERS = {"U32": "<u4", "I32": "<i4", "I64": "<i8"}
Index = slice | np.ndarray


@dataclass(frozen=True)
class Settings:
    """The settings that a quantizer left in config.json, at `where`."""

    data: dict
    where: str

    def must_be(self, key: str, *wanted: object, default: object = None) -> object:
        """The value of a key, `default` if it is missing or null. UserError if it is none of `wanted`."""
        value = self.data.get(key)
        value = default if value is None else value
        if value not in wanted or isinstance(value, bool) != isinstance(wanted[0], bool):
            choices = " or ".join(str(item).lower() if isinstance(item, bool) else str(item) for item in wanted)
            raise UserError(f"{self.where}: {key} {brief(value)} is not supported, wanted {choices}; {INSTEAD}.")
        return value


class PackedTensors(ABC):
    """The quantized matrices among the tensors of a model; others are left alone.

    names: those of the weights, as a dense model has them. parts: further tensors that they consist of.
    """

    def __init__(self, files: Files, names: frozenset[str], parts: frozenset[str]) -> None:
        self.files, self.names, self.parts = files, names, parts

    @abstractmethod
    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """UserError if the matrix does not have this shape, or is stored in a way that is not supported. Reads only
        headers and small tensors."""

    @abstractmethod
    def matrix(self, name: str):
        """The matrix, in a form that weights.device.lines_of takes; `check` has passed."""

    @abstractmethod
    def store(self, name: str) -> str:
        """The name of the matrix's store (ops/stores.py)."""

    @abstractmethod
    def float32(self, name: str, index: Index = slice(None)) -> np.ndarray:
        """The values of those of its rows."""

    def entry(self, name: str) -> Entry | None:
        if name not in self.files:
            return None
        file, stored = self.files[name]
        return file.entries[stored]

    def read(self, name: str) -> np.ndarray:
        """A tensor as stored, integers too."""
        file, stored = self.files[name]
        entry = file.entries[stored]
        if entry.dtype not in INTEGERS:
            return file.read(stored)
        raw, dtype = file.raw(stored), np.dtype(INTEGERS[entry.dtype])
        raw = raw.copy() if entry.offset % dtype.itemsize else raw
        return raw.view(dtype).reshape(entry.shape)

    def where(self, name: str) -> str:
        """A tensor and its file, for messages."""
        file, _ = self.files[name]
        return f"{file.path}: {name}"


class AffineTensors(PackedTensors):
    """Matrices of codes with a scale and a bias, or a zero point, for each group of columns."""

    codes = "weight"  # the part with the codes

    def __init__(self, files: Files, parts: tuple[str, ...]) -> None:
        """parts: the names of a matrix's tensors below its module, besides its codes; the first has its scales."""
        scaled = (name.removesuffix(f".{parts[0]}") for name in files if name.endswith(f".{parts[0]}"))
        modules = [module for module in scaled if f"{module}.{self.codes}" in files]
        more = {f"{module}.{part}" for module in modules for part in (self.codes, *parts)}
        names = frozenset(f"{module}.weight" for module in modules)
        super().__init__(files, names, frozenset(more) - names)
        self._forms: dict[str, tuple[tuple[int, int], int, int]] = {}

    @abstractmethod
    def form(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Bits and group size of a matrix, from its tensors' shapes. UserError as `check`."""

    @abstractmethod
    def rows(self, name: str, index: Index) -> Rows:
        """Those of the rows of a matrix."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            raise UserError(f"{self.at(name)} is quantized; wanted a tensor of shape {list(shape)}.")
        self._forms[name] = (shape, *self.form(name, shape))

    def matrix(self, name: str) -> Affine | Dense:
        if self.store(name) == "f32":
            return Dense(self.float32(name), "f32")
        shape, bits, group = self._forms[name]
        return Affine(shape, bits, group, lambda first, last: self.rows(name, slice(first, last)), self.at(name))

    def store(self, name: str) -> str:
        _, bits, group = self._forms[name]
        return f"affine{bits}_{group}"

    def float32(self, name: str, index: Index = slice(None)) -> np.ndarray:
        with np.errstate(all="ignore"):  # damaged scales are found when they are uploaded
            return self.rows(name, index).float32()

    def part(self, name: str, part: str) -> str:
        """The name of a part of the matrix `name`."""
        return f"{name.removesuffix('weight')}{part}"

    def at(self, name: str) -> str:
        return self.where(self.part(name, self.codes))

    def numbers(self, name: str, part: str, index: object = slice(None)) -> np.ndarray:
        """A part, or what `index` selects of it, in float32."""
        full = self.part(name, part)
        return widen(self.read(full)[index], DENSE_TYPES[self.entry(full).dtype])

    def shape(self, name: str, part: str) -> tuple[int, int]:
        """The shape of a part. UserError unless it is a matrix."""
        entry = self.entry(self.part(name, part))
        if entry is None or len(entry.shape) != 2 or not all(entry.shape):
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise UserError(f"{self.at(name)}: its {part} is {found}; wanted a matrix.")
        return entry.shape

    def expect(self, name: str, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """UserError unless a part has one of these dtypes, and this shape."""
        entry = self.entry(self.part(name, part))
        if entry is None or entry.dtype not in dtypes or entry.shape != shape:
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            wanted = f"{' or '.join(dtypes)} {list(shape)}"
            raise UserError(f"{self.at(name)}: its {part} is {found}; wanted {wanted} for the config's shape.")

    def supported(self, name: str, bits: float, group: float, columns: int, advice: str = INSTEAD) -> tuple[int, int]:
        """Bits and group size as integers; rows of one group count as several. UserError if there is no store."""
        if group == columns:
            group = next((size for size in reversed(GROUPS) if columns % size == 0), group)
        if bits not in BITS or group not in GROUPS:
            raise UserError(
                f"{self.at(name)}: {bits:g} bits in groups of {group:g} are not supported, wanted 4 or 8 bits in "
                f"groups of 32, 64 or 128; {advice}."
            )
        return int(bits), int(group)
