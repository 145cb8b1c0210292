"""bitnet.cpp's type i2_s: ternary codes of two bits, then one float32 scale for the matrix.

Three incompatible layouts share the type's number, and nothing in a file says which it has. The codes T + 1 lie in a
byte from its highest bits down:

x86       the byte i of 32 holds elements i, i + 32, i + 64 and i + 96 of 128 (ACT_PARALLEL; the file that Microsoft
          published)
x86_rows  a byte holds a column of four rows
arm       the byte i of 16 holds elements i, i + 16, i + 32 and i + 48 of 64

Layout: ggml-bitnet-mad.cpp in bitnet.cpp, `quantize_i2_s`.
"""

import math
from collections.abc import Callable

import numpy as np

from lorawgpu.errors import UserError

SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]
Shape = tuple[int, int]  # [out, in]


def _runs(raw: np.ndarray, width: int) -> np.ndarray:
    return raw.reshape(-1, 1, width) >> SHIFTS & np.uint8(3)


# Layout -> (elements that have to fill a matrix, or a column of it; how to read the codes).
LAYOUTS: dict[str, tuple[Callable[[Shape], bool], Callable[[np.ndarray, Shape], np.ndarray]]] = {
    "x86": (lambda shape: math.prod(shape) % 128 == 0, lambda raw, shape: _runs(raw, 32)),
    "x86_rows": (lambda shape: shape[0] % 4 == 0, lambda raw, shape: _runs(raw, shape[1])),
    "arm": (lambda shape: math.prod(shape) % 64 == 0, lambda raw, shape: _runs(raw, 16)),
}


def read_i2_s(raw: np.ndarray, shape: Shape, layout: str, where: str) -> tuple[np.ndarray, float]:
    """Codes T + 1, uint8 [out, in], and the scale, from the tensor's bytes. UserError if they cannot be of `layout`."""
    fits, read = LAYOUTS[layout]
    count = math.prod(shape) // 4
    if not fits(shape):
        raise UserError(f"{where}: {shape[0]} x {shape[1]} weights cannot be stored as i2_s in the layout {layout}.")
    codes = read(raw[:count], shape).reshape(shape)
    if codes.max() == 3:
        raise UserError(f"{where}: has codes that are not ternary; the file is damaged.")
    scale = float(raw[count : count + 4].view("<f4")[0])
    if not math.isfinite(scale) or scale <= 0:
        raise UserError(f"{where}: its scale is {scale}; wanted a positive number. The file is damaged.")
    return codes, scale
