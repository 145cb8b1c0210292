"""Where each adapter tensor lies in the four flat buffers (parameters, gradients, both moments) on the GPU.

The linear layers of a decoder layer form groups that share an input (families.spec.GROUPS). A group's A matrices
lie one after another, so that one product computes h for all of them; its B matrices follow. Ranks are padded to 4 and
widths to 16, so every tensor is a multiple of 256 bytes. The padding stays zero, because its gradient is zero.
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.lora.peft_dir import LoraConfig, adapter_shapes, tensor_names

RANK_PAD = 4


@dataclass(frozen=True)
class AdapterSlot:
    """One tensor: `shape` as in PEFT, `stored` shape with padding, `start` in elements of the flat buffers."""

    name: str
    shape: tuple
    stored: tuple
    start: int


@dataclass(frozen=True)
class LoraPath:
    """The adapter of one linear layer: its place in the group's fused output and in h, and its two tensors."""

    index: int  # in the group
    module: str  # such as "q_proj"
    column: int  # its first column in the group's fused output
    width: int  # width of its output, padded
    rank: int  # padded
    h: int  # its first column in h
    scale: float
    a: AdapterSlot
    b: AdapterSlot


@dataclass(frozen=True)
class GroupLayout:
    """The adapters of one group in one layer: one path per linear layer that has an adapter."""

    layer: int
    group: str
    paths: tuple
    columns: tuple  # where each linear layer of the group ends in the fused output

    @property
    def rank(self) -> int:
        """Total rank of all paths, which is the width of h."""
        return sum(p.rank for p in self.paths)

    def span(self, flat: Tensor) -> Tensor:
        """The group's range of a flat buffer."""
        first, last = self.paths[0].a, self.paths[-1].b
        return flat.view(
            first.start, (last.start + last.stored[0] * last.stored[1] - first.start,), f"adapter {self.group}"
        )

    def a_all(self, flat: Tensor) -> Tensor:
        """All A matrices of the group as one matrix [rank, in]."""
        return flat.view(self.paths[0].a.start, (self.rank, self.paths[0].a.stored[1]), f"lora_A {self.group}")

    def b_all(self, flat: Tensor) -> Tensor:
        """All B matrices as one matrix [fused output, rank], if all linear layers have adapters of the same rank."""
        first = self.paths[0].b
        return flat.view(first.start, (self.columns[-1], first.stored[1]), f"lora_B {self.group}")


class AdapterLayout:
    """The offset table of an adapter: `slots` by PEFT name, `groups` by (layer, group), `size` in elements."""

    def __init__(self, lora: LoraConfig, model: ModelConfig):
        self.lora, self.model = lora, model
        self.shapes = adapter_shapes(lora, model)
        self.slots, self.groups, self.size = {}, {}, 0
        for layer in range(model.num_hidden_layers):
            for group in GROUPS:
                if layout := self._group(layer, group):
                    self.groups[layer, group] = layout

    def _slot(self, name: str, stored: tuple) -> AdapterSlot:
        slot = AdapterSlot(name, self.shapes[name], stored, self.size)
        self.slots[name], self.size = slot, self.size + stored[0] * stored[1]
        return slot

    def _group(self, layer: int, group: str) -> GroupLayout | None:
        modules = self.model.group_modules(layer, group)
        if not modules:
            return None
        widths = [padded(out) for out, _ in self.model.layers[layer].group_shapes(group)]
        present = [(i, m, tensor_names(m)) for i, m in enumerate(modules) if tensor_names(m)[0] in self.shapes]
        ranks = {m: padded(self.lora.rank(m), RANK_PAD) for _, m, _ in present}
        a = {m: self._slot(names[0], (ranks[m], padded(self.shapes[names[0]][1]))) for _, m, names in present}
        b = {m: self._slot(names[1], (widths[i], ranks[m])) for i, m, names in present}
        paths, h = [], 0
        for i, m, _ in present:
            paths.append(
                LoraPath(
                    i, m.rsplit(".", 1)[1], sum(widths[:i]), widths[i], ranks[m], h, self.lora.scale(m), a[m], b[m]
                )
            )
            h += ranks[m]
        return GroupLayout(layer, group, tuple(paths), tuple(np.cumsum(widths).tolist())) if paths else None

    def first_trainable_group(self) -> tuple:
        """(layer, index in GROUPS) of the first group that has an adapter. The backward pass stops there."""
        return min((layer, GROUPS.index(group)) for layer, group in self.groups)

    def flatten(self, tensors: dict) -> np.ndarray:
        """PEFT tensors -> the flat buffer, float32 [size]. ValueError if names or shapes differ from the layout."""
        flat = np.zeros(self.size, np.float32)
        if tensors.keys() != self.slots.keys():
            raise ValueError(
                f"adapter tensors differ from the layout: {sorted(tensors.keys() ^ self.slots.keys())[:3]}"
            )
        for name, slot in self.slots.items():
            if tensors[name].shape != slot.shape:
                raise ValueError(f"{name}: got {tensors[name].shape}, wanted {slot.shape}")
            self._view(flat, slot)[:] = tensors[name]
        return flat

    def unflatten(self, flat: np.ndarray) -> dict:
        """The flat buffer -> PEFT tensors by name, in layout order."""
        return {name: self._view(flat, slot).copy() for name, slot in self.slots.items()}

    @staticmethod
    def _view(flat: np.ndarray, slot: AdapterSlot) -> np.ndarray:
        rows, columns = slot.stored
        stored = flat[slot.start : slot.start + rows * columns].reshape(rows, columns)
        return stored[: slot.shape[0], : slot.shape[1]]
