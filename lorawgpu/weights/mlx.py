"""Matrices that mlx-lm has quantized, embeddings too.

X.weight, uint32: codes of 4 or 8 bits, the first column lowest; X.scales and X.biases, for each group of columns:
weight = code * scale + bias. Layout: documentation of mlx.core.quantize.
"""

from lorawgpu.files.dtypes import DENSE_TYPES
from lorawgpu.weights.affine import Rows, unpack
from lorawgpu.weights.packed import AffineTensors, Files, Index, Settings

ADVICE = "convert the model again (mlx_lm.convert -q --q-bits 4 --q-group-size 64)"


class MlxTensors(AffineTensors):
    def __init__(self, files: Files, settings: Settings) -> None:
        settings.must_be("mode", "affine", default="affine")
        super().__init__(files, ("scales", "biases"))

    def form(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        words, groups = self.shape(name, "weight")[1], self.shape(name, "scales")[1]
        bits, group = self.supported(name, words * 32 / columns, columns / groups, columns, ADVICE)
        self.expect(name, "weight", ("U32",), (rows, columns * bits // 32))
        for part in ("scales", "biases"):
            self.expect(name, part, tuple(DENSE_TYPES), (rows, groups))
        return bits, group

    def rows(self, name: str, index: Index) -> Rows:
        _, bits, group = self._forms[name]
        scales, biases = (self.numbers(name, part, index) for part in ("scales", "biases"))
        return Rows(unpack(self.read(name)[index], bits), scales, biases).in_groups(group)
