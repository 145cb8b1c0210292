"""Matrices of compressed-tensors in the format pack-quantized (llm-compressor's W4A16 and W8A16).

X.weight_packed, int32 [out, in * bits / 32]: codes, the first column lowest; X.weight_scale [out, groups];
X.weight_zero_point, packed along rows, unless quantization is symmetric, where it is half of the range; X.weight_shape.
weight = (code - zero) * scale.
"""

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.files.dtypes import DENSE_TYPES
from lorawgpu.files.untrusted import brief
from lorawgpu.weights.affine import Rows, unpack
from lorawgpu.weights.packed import BITS, INSTEAD, AffineTensors, Files, Index, Settings

FORMAT = "pack-quantized"


class CompressedTensors(AffineTensors):
    codes = "weight_packed"

    def __init__(self, files: Files, settings: Settings) -> None:
        settings.must_be("format", FORMAT, default=FORMAT)
        settings.must_be("transform_config", {}, default={})
        groups = settings.data.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise UserError(f"{settings.where}: config_groups is {brief(groups)}; wanted groups of settings.")
        for name, group in groups.items():
            _check_group(Settings(group, f"{settings.where}, config_groups {brief(name)}"))
        super().__init__(files, ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"))

    def form(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        words, groups = self.shape(name, "weight_packed")[1], self.shape(name, "weight_scale")[1]
        bits, group = self.supported(name, words * 32 / columns, columns / groups, columns)
        self.expect(name, "weight_packed", ("I32",), (rows, columns * bits // 32))
        self.expect(name, "weight_scale", tuple(DENSE_TYPES), (rows, groups))
        if self.entry(self.part(name, "weight_zero_point")):
            self.expect(name, "weight_zero_point", ("I32",), (-(-rows * bits // 32), groups))
        if self.entry(self.part(name, "weight_g_idx")):
            raise UserError(f"{self.at(name)}: actorder group (weight_g_idx) is not supported; {INSTEAD}.")
        return bits, group

    def store(self, name: str) -> str:
        """With scales of 24 bits, products with zero points would round: such a matrix becomes float32."""
        exact = self.entry(self.part(name, "weight_scale")).dtype != "F32"
        return super().store(name) if exact else "f32"

    def rows(self, name: str, index: Index) -> Rows:
        codes, scales, zeros = self._stored(name, index)
        return Rows(codes, scales, -zeros * scales).in_groups(self._forms[name][2])

    def float32(self, name: str, index: Index = slice(None)) -> np.ndarray:
        codes, scales, zeros = self._stored(name, index)
        grouped = codes.reshape(*scales.shape, -1).astype(np.float32)
        with np.errstate(all="ignore"):  # damaged scales are found when they are uploaded
            return ((grouped - zeros[..., None]) * scales[..., None]).reshape(codes.shape)

    def _stored(self, name: str, index: Index) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Codes, scales and zero points of rows."""
        (rows, _), bits, _ = self._forms[name]
        codes = unpack(self.read(self.part(name, "weight_packed"))[index], bits)
        scales = self.numbers(name, "weight_scale", index)
        zeros = np.full_like(scales, 1 << bits - 1)
        if self.entry(packed := self.part(name, "weight_zero_point")):
            zeros = unpack(self.read(packed).T, bits).T[:rows][index].astype(np.float32)
        return codes, scales, zeros


def _check_group(group: Settings) -> None:
    weights = group.data.get("weights")
    if not isinstance(weights, dict):
        raise UserError(f"{group.where}: weights is {brief(weights)}; wanted settings of weights that are quantized.")
    inner = Settings(weights, f"{group.where}, weights")
    group.must_be("format", FORMAT, default=FORMAT)
    inner.must_be("type", "int", default="int")
    inner.must_be("num_bits", *BITS)
    inner.must_be("strategy", "group", "channel")
    for part in ("input_activations", "output_activations"):
        if group.data.get(part) is not None:
            raise UserError(f"{group.where}: {part} are quantized; this is not supported, {INSTEAD}.")
