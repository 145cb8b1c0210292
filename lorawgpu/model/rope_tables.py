"""Tables of cosines and sines on the GPU, one for each RoPE and head size in a model."""

from lorawgpu.families.config import ModelConfig
from lorawgpu.families.spec import AttentionSpec
from lorawgpu.gpu import Tensor
from lorawgpu.ops.rope import rope_table


class RopeTables:
    """The tables for all layers of a model, with `positions` rows each."""

    def __init__(self, device, config: ModelConfig, positions: int):
        self._tables = {}
        for spec in dict.fromkeys(layer.attention for layer in config.layers):
            if self._key(spec) not in self._tables:
                table = rope_table(spec.rope.inv_freq(spec.head_dim), positions)
                self._tables[self._key(spec)] = device.upload(table, label="rope table", kind="step")

    def of(self, spec: AttentionSpec) -> Tensor:
        """f32 [positions, HD]: cos, then sin."""
        return self._tables[self._key(spec)]

    @staticmethod
    def _key(spec: AttentionSpec):
        return spec.rope, spec.head_dim
