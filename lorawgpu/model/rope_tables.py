"""Tables of cosines and sines on the GPU, one for each RoPE and head size in a model."""

import numpy as np

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import AttentionSpec
from lorawgpu.gpu import Tensor
from lorawgpu.ops.rope import rope_table


class RopeTables:
    """The tables for all layers of a model, with `positions` rows each.

    If the frequencies of a layer depend on the length of the sequence (longrope), all tables have twice the rows: those
    from `positions` on are for long sequences, whose positions are shifted by as much.
    """

    def __init__(self, device, config: ModelConfig, positions: int):
        self._tables = {}
        self.positions, self.longest_short = positions, config.longest_short
        switches = self.longest_short is not None
        for spec in dict.fromkeys(layer.attention for layer in config.layers):
            if self._key(spec) not in self._tables:
                rope = spec.rope
                q_scale = rope.query_scale(np.arange(positions)) if rope.query_beta else None
                table = np.concatenate(
                    [
                        rope_table(rope.inv_freq(spec.head_dim, long), positions, rope.attention_factor, q_scale)
                        for long in (False, True)[: 1 + switches]
                    ]
                )
                self._tables[self._key(spec)] = device.upload(table, label="rope table", kind="step")

    def of(self, spec: AttentionSpec) -> Tensor:
        """f32 [rows, rotary]: cos, then sin, times the RoPE's attention factor (ops.rope.rope_table)."""
        return self._tables[self._key(spec)]

    def rows_of(self, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        """The row of the tables for a position in a sequence of `length` tokens."""
        return position if self.longest_short is None else position + self.positions * (length > self.longest_short)

    @staticmethod
    def _key(spec: AttentionSpec):
        return spec.rope, spec.head_dim
