"""bitsandbytes' 4-bit type NF4: sixteen levels, and a float32 scale for each 64 weights of a row."""

from dataclasses import dataclass

import numpy as np

# The levels of NF4: quantiles of a normal distribution, as bitsandbytes and QLoRA (arXiv:2305.14314, appendix E) have
# them. shaders/common/nf4.wgsl has the same values.
NF4_LEVELS = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip


@dataclass(frozen=True)
class Nf4:
    """A matrix in NF4: codes uint8 [out, in / 2], the first in the high nibble, and float32 scales [out, in / 64].
    `where`: for messages."""

    packed: np.ndarray
    scales: np.ndarray
    where: str

    def codes(self) -> np.ndarray:
        """uint8 [out, in]."""
        return np.stack([self.packed >> 4, self.packed & 15], axis=-1).reshape(len(self.packed), -1)

    def float32(self) -> np.ndarray:
        """The values [out, in], bit by bit those of bitsandbytes."""
        levels = NF4_LEVELS[self.codes()].reshape(*self.scales.shape, -1)
        return (levels * self.scales[..., None]).reshape(len(self.packed), -1)
