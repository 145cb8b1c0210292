"""Matrices in the layouts of GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ, version gemm).

X.qweight, int32: codes of eight rows (GPTQ: of eight columns) in a word; X.qzeros: zero points, packed along rows;
X.scales [groups, out]: weight = (code - zero) * scale. GPTQ's X.g_idx has the group of each column. GPTQ's first format
stores zero - 1. AWQ's nibbles hold rows 0, 2, 4, 6, 1, 3, 5, 7.
"""

from abc import abstractmethod

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.weights.affine import Rows, unpack
from lorawgpu.weights.packed import BITS, INSTEAD, AffineTensors, Files, Index, Settings

HALVES = ("F16", "BF16")  # with these, products of scales and zero points are exact
AWQ_ROWS = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


class ZeroPointTensors(AffineTensors):
    """Matrices with packed zero points."""

    codes = "qweight"

    @abstractmethod
    def zeros(self, name: str) -> np.ndarray:
        """Zero points, float32 [groups, out]."""

    def expect_common(self, name: str, rows: int, columns: int, bits: int) -> None:
        groups = self.shape(name, "scales")[0]
        self.expect(name, "scales", HALVES, (groups, rows))
        self.expect(name, "qzeros", ("I32",), (groups, rows * bits // 32))

    def of(self, name: str, codes: np.ndarray, index: Index) -> Rows:
        """Rows from their codes, with the scales and zero points of the matrix."""
        scales = self.numbers(name, "scales", np.s_[:, index]).T
        return Rows(codes, scales, -self.zeros(name)[:, index].T * scales).in_groups(self._forms[name][2])


class GptqTensors(ZeroPointTensors):
    def __init__(self, files: Files, settings: Settings) -> None:
        settings.must_be("bits", *BITS)
        formats = ("gptq", "gptq_v2")
        key = "checkpoint_format" if "checkpoint_format" in settings.data else "format"  # GPTQModel's newer name
        self._less = 1 if settings.must_be(key, *formats, default="gptq") == "gptq" else 0
        super().__init__(files, ("scales", "qzeros", "g_idx"))

    def form(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        words, groups = self.shape(name, "qweight")[0], self.shape(name, "scales")[0]
        bits, group = self.supported(name, words * 32 / columns, columns / groups, columns)
        self.expect(name, "qweight", ("I32",), (columns * bits // 32, rows))
        self.expect_common(name, rows, columns, bits)
        self._expect_order(name, columns, columns // groups)
        return bits, group

    def _expect_order(self, name: str, columns: int, group: int) -> None:
        """UserError if the groups are not runs of columns (act-order)."""
        if self.entry(self.part(name, "g_idx")) is None:
            return
        self.expect(name, "g_idx", ("I32",), (columns,))
        if not np.array_equal(self.read(self.part(name, "g_idx")), np.arange(columns) // group):
            raise UserError(
                f"{self.at(name)}: its columns are grouped in another order (g_idx), as desc_act: true (act-order) "
                f"makes them; this is not supported: use a GPTQ model with desc_act: false, or {INSTEAD}."
            )

    def zeros(self, name: str) -> np.ndarray:
        zeros = unpack(self.read(self.part(name, "qzeros")), self._forms[name][1])
        return zeros.astype(np.float32) + np.float32(self._less)

    def rows(self, name: str, index: Index) -> Rows:
        words = self.read(self.part(name, "qweight"))[:, index].T
        return self.of(name, unpack(words, self._forms[name][1]), index)


class AwqTensors(ZeroPointTensors):
    def __init__(self, files: Files, settings: Settings) -> None:
        settings.must_be("bits", 4)
        settings.must_be("version", "gemm", default="gemm")
        settings.must_be("zero_point", True, default=True)
        super().__init__(files, ("scales", "qzeros"))

    def form(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        words, groups = self.shape(name, "qweight")[1], self.shape(name, "scales")[0]
        bits, group = self.supported(name, words * 32 / rows, columns / groups, columns)
        self.expect(name, "qweight", ("I32",), (columns, rows * bits // 32))
        self.expect_common(name, rows, columns, bits)
        return bits, group

    def zeros(self, name: str) -> np.ndarray:
        return _in_order(self.read(self.part(name, "qzeros"))).astype(np.float32)

    def rows(self, name: str, index: Index) -> Rows:
        if not isinstance(index, slice):
            return Rows(*(part[index] for part in self.rows(name, slice(None))))
        first, last, _ = index.indices(self._forms[name][0][0])
        start = first // 8  # whole words
        codes = _in_order(self.read(self.part(name, "qweight"))[:, start : -(-last // 8)])
        return self.of(name, np.ascontiguousarray(codes[:, first - 8 * start : last - 8 * start].T), index)


def _in_order(words: np.ndarray) -> np.ndarray:
    """Codes of AWQ's words in the order of rows."""
    codes = unpack(words, 4)
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ_ROWS].reshape(codes.shape)
