"""The size of an adapter, and how far each of its modules has moved from its start."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorawgpu.families.modules import ALL_MODULES
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, tensor_names

_MODULE = re.compile(r"base_model\.model\.(?P<module>.*layers\.(?P<layer>\d+)\.(.*\.)?(?P<name>\w+))\.lora_A\.weight")


@dataclass(frozen=True)
class Adapter:
    """`change[layer][name]`: the Frobenius norm of a module's update s B A minus its update at the start."""

    place: Path
    lora: LoraConfig
    parameters: int
    nbytes: int
    change: dict[int, dict[str, float]]
    continued: bool

    @property
    def modules(self) -> list[str]:
        """Names of the adapted linear layers, in forward order."""
        present = {name for layer in self.change.values() for name in layer}
        return [name for name in ALL_MODULES if name in present]

    def layer_change(self, layer: int) -> float:
        """The change of all modules of a layer together."""
        return float(np.sqrt(sum(value**2 for value in self.change[layer].values())))


def read_change(place: Path, start: Path | None) -> Adapter:
    """The adapter in `place` compared with the one in `start`. Raises UserError as `read_adapter` does.

    If `start` is None or no longer exists, the comparison is with a new adapter, whose B A is 0.
    """
    lora, tensors = read_adapter(place)
    old_lora, old = read_adapter(start) if start and start.is_dir() else (lora, {})
    change = {}
    for name in tensors:
        if match := _MODULE.fullmatch(name):
            a, b = tensor_names(match["module"])
            pairs = [(tensors[a], tensors[b] * lora.scale(match["module"]))]
            if a in old:
                pairs.append((old[a], old[b] * -old_lora.scale(match["module"])))
            layer = change.setdefault(int(match["layer"]), {})
            layer[match["name"]] = product_norm(*(np.concatenate(side, axis) for side, axis in _sides(pairs)))
    parameters = sum(tensor.size for tensor in tensors.values())
    ordered = {layer: change[layer] for layer in sorted(change)}
    return Adapter(place, lora, parameters, sum(t.nbytes for t in tensors.values()), ordered, bool(old))


def _sides(pairs):
    """[A; A0] and [B, B0], whose product is B A + B0 A0."""
    return ([a for a, _ in pairs], 0), ([b for _, b in pairs], 1)


def product_norm(a: np.ndarray, b: np.ndarray) -> float:
    """||B A|| without forming it: ||B A||^2 = sum of (B^T B) * (A A^T), in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.sqrt(max(0.0, np.sum((b.T @ b) * (a @ a.T)))))
