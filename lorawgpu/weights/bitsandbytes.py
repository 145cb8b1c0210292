"""Linear layers in bitsandbytes' NF4, as transformers saves them, with single or nested statistics.

For a weight X of N x K: X, uint8 [N K / 2, 1], two codes a byte, the first in the high nibble; X.absmax, a scale for
each 64 weights, in float32 or, nested, a uint8 for nested_quant_map[absmax] * nested_absmax + nested_offset;
X.quant_state.bitsandbytes__nf4, the settings as JSON. Layout: functional.py of bitsandbytes, `QuantState.as_dict`.
"""

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.untrusted import brief, parse_json
from lorawgpu.weights.nf4 import NF4_LEVELS, Nf4
from lorawgpu.weights.packed import Files, Index, PackedTensors, Settings

BLOCK = 64
STATE = "quant_state.bitsandbytes__nf4"
PARTS = (STATE, "absmax", "quant_map", "nested_absmax", "nested_quant_map")


class Nf4Tensors(PackedTensors):
    def __init__(self, files: Files, settings: Settings | None = None) -> None:
        settings = settings or Settings({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "")
        settings.must_be("load_in_4bit", True)
        settings.must_be("bnb_4bit_quant_type", "nf4")
        names = frozenset(name.removesuffix(f".{STATE}") for name in files if name.endswith(f".{STATE}"))
        super().__init__(files, names, frozenset(f"{name}.{part}" for name in names for part in PARTS))

    def store(self, name: str) -> str:
        return "nf4"

    def float32(self, name: str, index: Index = slice(None)) -> np.ndarray:
        return self.matrix(name).float32()[index]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """UserError if the matrix does not have this shape, or its settings are not supported. Reads no weights."""
        state, where = self._state(name), self.where(name)
        wanted = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape)}
        for key, value in wanted.items():
            if state.get(key) != value:
                raise UserError(f"{where}: {key} is {brief(state.get(key))} in its quant_state; wanted {value}.")
        if len(shape) != 2 or shape[1] % BLOCK:
            raise UserError(f"{where}: rows of {shape[-1]} are not whole blocks of {BLOCK}; this is not supported.")
        count = shape[0] * shape[1]
        entries = {part: self._entry(name, part) for part in PARTS[1:]}
        nested = entries["nested_absmax"] is not None
        groups = count // BLOCK
        sizes = {"": ("U8", count // 2), "absmax": ("U8" if nested else "F32", groups), "quant_map": ("F32", 16)}
        if nested:
            size = state.get("nested_blocksize")
            if type(size) is not int or size < 1 or type(state.get("nested_offset")) is not float:
                raise UserError(f"{where}: nested_blocksize or nested_offset is missing in its quant_state.")
            sizes |= {"nested_absmax": ("F32", -(-groups // size)), "nested_quant_map": ("F32", 256)}
        for part, (dtype, size) in sizes.items():
            entry = self._entry(name, part)
            if entry is None or (entry.dtype, int(np.prod(entry.shape))) != (dtype, size):
                found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise UserError(f"{where}: its {part or 'codes'} are {found}; wanted {size} values of {dtype}.")

    def matrix(self, name: str) -> Nf4:
        """The matrix; `check` has passed. UserError for levels other than NF4's."""
        if not np.array_equal(self._read(name, "quant_map"), NF4_LEVELS):
            raise UserError(f"{self.where(name)}: its quant_map is not that of NF4.")
        state = self._state(name)
        out, width = state["shape"]
        absmax = self._read(name, "absmax")
        if absmax.dtype == np.uint8:
            nested = np.repeat(self._read(name, "nested_absmax"), state["nested_blocksize"])[: absmax.size]
            absmax = self._read(name, "nested_quant_map")[absmax] * nested + np.float32(state["nested_offset"])
        packed = self._read(name, "").reshape(out, width // 2)
        return Nf4(packed, absmax.reshape(out, -1), self.where(name))

    def _entry(self, name: str, part: str):
        return self.entry(f"{name}.{part}" if part else name)

    def _read(self, name: str, part: str) -> np.ndarray:
        return self.read(f"{name}.{part}" if part else name).reshape(-1)

    def _state(self, name: str) -> dict:
        where = f"{self.where(name)}.{STATE}"
        entry = self._entry(name, STATE)
        if entry.dtype != "U8" or not isinstance(state := parse_json(self._read(name, STATE).tobytes(), where), dict):
            raise UserError(f"{where}: wanted a JSON object in bytes.")
        return state
