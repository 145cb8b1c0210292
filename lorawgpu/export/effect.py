"""The effect of an adapter on each linear layer, whatever its file format: W becomes W + scale * B @ A."""

import re
from dataclasses import dataclass

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export.ends import trained_ends
from lorawgpu.families.modules import ALL_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import tensor_names

TOLERANCE = 1e-6  # float32: alpha, and a matrix that absorbs a factor, are rounded once each, 6e-8 relative
LINEAR = re.compile(
    rf"model\.(language_model\.)?layers\.(?P<layer>\d+)\.(?P<path>((self_attn|mlp|shared_mlp)\.)?({'|'.join(ALL_MODULES)}))"
)


@dataclass(frozen=True)
class WeightChange:
    """The change of one weight matrix: `scale * b @ a`, a [r, in], b [out, r], its rows in Hugging Face's order."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    def delta(self) -> np.ndarray:
        """The change as a matrix, float32 [out, in]."""
        return (np.float32(self.scale) * self.b) @ self.a


def effect_of(lora: LoraConfig, tensors: dict[str, np.ndarray]) -> dict[str, WeightChange]:
    """The change of each adapted linear layer of a decoder layer, by module path. Raises UserError for any other module
    but embedding and head (export/ends.py)."""
    effect, ends = {}, trained_ends(tensors)
    inner = (name for name in tensors if name not in ends)
    for module in dict.fromkeys(name.removeprefix("base_model.model.").split(".lora_")[0] for name in inner):
        if not LINEAR.fullmatch(module):
            raise UserError(
                f"the adapter changes {module}, which is not a linear layer of a decoder layer: such adapters are not "
                "exported"
            )
        a, b = tensor_names(module)
        effect[module] = WeightChange(tensors[a], tensors[b], lora.scale(module))
    return effect


def as_tensors(lora: LoraConfig, effect: dict[str, WeightChange]) -> dict[str, np.ndarray]:
    """PEFT tensors that have this effect with the ranks and scales of `lora`.

    Rows and columns beyond a rank are dropped: some formats pad, and `check_effect` checks that the padding is 0.
    """
    tensors = {}
    for module, change in effect.items():
        (a, b), rank = tensor_names(module), lora.rank(module)
        tensors[a] = change.a[:rank]
        tensors[b] = (change.b[:, :rank] * (change.scale / lora.scale(module))).astype(np.float32)
    return tensors


def one_scale(scales: dict[str, float]) -> tuple[float, dict[str, float]]:
    """For a format with a single scale: the most frequent one, and the remaining factor of each module."""
    values = list(scales.values())
    common = max(values, key=values.count)
    return common, {module: scale / common for module, scale in scales.items()}


def difference(ours: WeightChange, theirs: WeightChange) -> float:
    """||theirs - ours|| / ||ours|| of the changes (Frobenius norm); only the numerator if ours is 0.

    Never builds [out, in]: ||P Q|| = ||R_P R_Q^T|| with P = [s B, -s' B'], Q^T = [A; A'] and R from QR.
    """
    if ours.a.shape[1] != theirs.a.shape[1] or len(ours.b) != len(theirs.b):
        return float("inf")
    b = np.hstack([ours.scale * ours.b.astype(np.float64), -theirs.scale * theirs.b.astype(np.float64)])
    a = np.vstack([ours.a, theirs.a]).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    r = len(ours.a)
    size = _norm(b[:, :r], a[:r])
    return _norm(b, a) / (size or 1.0)


def _norm(b: np.ndarray, a: np.ndarray) -> float:
    """||b @ a|| for tall b and wide a."""
    return float(np.linalg.norm(np.linalg.qr(b, "r") @ np.linalg.qr(a.T, "r").T))


def check_effect(ours: dict[str, WeightChange], theirs: dict[str, WeightChange], where: str) -> float:
    """The largest `difference`. Raises CheckFailed if it exceeds rounding or the sets of modules differ."""
    if odd := sorted(ours.keys() ^ theirs.keys()):
        raise CheckFailed(f"{where}, read back: {odd[0]} is in only one of adapter and export")
    errors = {module: difference(change, theirs[module]) for module, change in ours.items()}
    worst = max(errors, key=errors.get)
    if not errors[worst] <= TOLERANCE:
        raise CheckFailed(
            f"{where}, read back: the change of {worst} differs from the adapter's by {errors[worst]:.1e}"
        )
    return errors[worst]
