"""Where each adapter tensor lies in the four flat buffers (parameters, gradients, both moments) on the GPU.

The linear layers of a decoder layer form groups that share an input (families.spec.GROUPS). A group's A matrices
lie one after another, so that one product computes h for all of them; its B matrices follow. Ranks are padded to 4 and
widths to 16, so every tensor is a multiple of 256 bytes. The padding stays zero, because its gradient is zero.

What is trained of the embedding comes before the layers, what is trained of the head after them. A matrix that is
trained whole has buffers of its own, cut by rows: offsets go on over all buffers (lora/flat.py).
"""

from dataclasses import dataclass

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import EMBEDDING, HEAD
from lorawgpu.families.spec import GROUPS
from lorawgpu.gpu.tensor import PAD, Tensor, padded
from lorawgpu.lora.ends import end_paths, rows_name, rows_of, saved_name
from lorawgpu.lora.flat import BUFFER
from lorawgpu.lora.peft_dir import LoraConfig, adapter_shapes, tensor_names

RANK_PAD = 4
BELOW = -1  # the number of the layer that the embedding stands for; the head's is that of the layers


@dataclass(frozen=True)
class AdapterSlot:
    """One tensor: `shape` as in PEFT, `stored` shape with padding, `start` in elements of the flat buffers."""

    name: str
    shape: tuple
    stored: tuple
    start: int
    transposed: bool = False  # whether the file has it the other way round

    def of(self, flat) -> Tensor:
        """The tensor in a flat buffer, unless it is a matrix that is trained whole."""
        return flat.view(self.start, self.stored, self.name)


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


@dataclass(frozen=True)
class EmbeddingLora:
    """LoRA on the embedding: A as [V, r], so that it is looked up by rows, and B [C, r]; the rank is padded to 16."""

    a: AdapterSlot
    b: AdapterSlot
    scale: float

    @property
    def rank(self) -> int:
        return self.a.stored[1]


@dataclass(frozen=True)
class TokenRows:
    """The rows `ids` of a matrix, which are trained: [padded(n), C]. `ends`: the matrices that have them."""

    ids: tuple[int, ...]
    slot: AdapterSlot
    ends: tuple[str, ...]


class AdapterLayout:
    """The offset table of an adapter: `slots` by PEFT name, `groups` by (layer, group), `size` in elements.

    `matrices`: what is trained whole, `tokens`: rows that are trained, both by EMBEDDING and HEAD. `starts`: where each
    layer begins. `buffers`: the ranges of elements that are buffers of their own.
    """

    def __init__(self, lora: LoraConfig, model: ModelConfig):
        self.lora, self.model = lora, model
        self.shapes = adapter_shapes(lora, model)
        self.slots, self.groups, self.starts, self.size = {}, {}, {}, 0
        self.matrices, self.tokens, self.embedding_lora = {}, {}, None
        self._matrix(EMBEDDING)
        first = self.size
        self._embedding()
        for layer in range(model.num_hidden_layers):
            for group in GROUPS:
                if layout := self._group(layer, group):
                    self.groups[layer, group] = layout
        self._head()
        last = self.size
        self._matrix(HEAD)
        ranges = [*self._cuts(0, first), (first, last), *self._cuts(last, self.size)]
        self.buffers = [(start, stop) for start, stop in ranges if stop > start]

    def _slot(self, layer: int, name: str, stored: tuple, transposed: bool = False) -> AdapterSlot:
        slot = AdapterSlot(name, self.shapes[name], stored, self.size, transposed)
        self.starts.setdefault(layer, self.size)
        self.slots[name], self.size = slot, self.size + stored[0] * stored[1]
        return slot

    @property
    def _layer_of(self) -> dict[str, int]:
        return {EMBEDDING: BELOW, HEAD: self.model.num_hidden_layers}

    @property
    def _table(self) -> tuple[int, int]:
        """The padded shape of the embedding and the head."""
        return padded(self.model.vocab_size), padded(self.model.hidden_size)

    def _matrix(self, end: str) -> None:
        """Place a matrix that is trained whole."""
        if (name := saved_name(end_paths(self.model)[end])) in self.shapes:
            self.matrices[end] = self._slot(self._layer_of[end], name, self._table)

    def _cuts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The buffers of a matrix, each of whole rows."""
        step = rows_in_buffer(self._table[1]) * self._table[1]
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def _rows(self, end: str) -> None:
        if (ids := rows_of(self.lora, self.model, end)) is not None:
            stored = padded(len(ids)), self._table[1]
            slot = self._slot(self._layer_of[end], rows_name(end_paths(self.model)[end]), stored)
            ends = (EMBEDDING, HEAD) if self.model.tie_word_embeddings else (end,)
            self.tokens |= dict.fromkeys(ends, TokenRows(ids, slot, ends))

    def _embedding(self) -> None:
        self._rows(EMBEDDING)
        module = end_paths(self.model)[EMBEDDING]
        a, b = tensor_names(module)
        if a in self.shapes:
            (vocab, hidden), rank = self._table, padded(self.lora.rank(module))
            slots = self._slot(BELOW, a, (vocab, rank), transposed=True), self._slot(BELOW, b, (hidden, rank))
            self.embedding_lora = EmbeddingLora(*slots, self.lora.scale(module))

    def _head(self) -> None:
        self._rows(HEAD)
        a, b = tensor_names(HEAD)
        if a in self.shapes:
            (vocab, hidden), rank = self._table, padded(self.lora.rank(HEAD), RANK_PAD)
            layer = self._layer_of[HEAD]
            slots = self._slot(layer, a, (rank, hidden)), self._slot(layer, b, (vocab, rank))
            path = LoraPath(0, HEAD, 0, vocab, rank, 0, self.lora.scale(HEAD), *slots)
            self.groups[layer, HEAD] = GroupLayout(layer, HEAD, (path,), (vocab,))

    @property
    def head(self) -> GroupLayout | None:
        """LoRA on the head."""
        return self.groups.get((self.model.num_hidden_layers, HEAD))

    @property
    def trains_embedding(self) -> bool:
        """Whether the backward has to reach the embedding."""
        return bool(self.embedding_lora or EMBEDDING in self.matrices or EMBEDDING in self.tokens)

    def parts(self, end: str) -> list[tuple[int, int]]:
        """The ranges of rows of a matrix that is trained whole, one for each of its buffers."""
        slot, width = self.matrices[end], self._table[1]
        return [((a - slot.start) // width, (b - slot.start) // width)
                for a, b in self.buffers if slot.start <= a < slot.start + slot.stored[0] * width]  # fmt: skip

    def _group(self, layer: int, group: str) -> GroupLayout | None:
        modules = self.model.group_modules(layer, group)
        if not modules:
            return None
        widths = [padded(out) for out, _ in self.model.layers[layer].group_shapes(group)]
        present = [(i, m, tensor_names(m)) for i, m in enumerate(modules) if tensor_names(m)[0] in self.shapes]
        ranks = {m: padded(self.lora.rank(m), RANK_PAD) for _, m, _ in present}
        a = {m: self._slot(layer, names[0], (ranks[m], padded(self.shapes[names[0]][1]))) for _, m, names in present}
        b = {m: self._slot(layer, names[1], (widths[i], ranks[m])) for i, m, names in present}
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
        if self.trains_embedding:
            return BELOW, 0
        groups = ((layer, GROUPS.index(group)) for layer, group in self.groups if group in GROUPS)
        return min(groups, default=(self.model.num_hidden_layers, 0))

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
        stored = stored.T if slot.transposed else stored
        return stored[: slot.shape[0], : slot.shape[1]]


def rows_in_buffer(width: int) -> int:
    """Rows of `width` floats in a buffer of a matrix that is trained whole: as many as every device can bind."""
    return max(PAD, BUFFER // (4 * width) // PAD * PAD)
