"""A checkpoint whose linear layers are quantized as they are uploaded (`load_in_8bit`, `load_in_4bit`)."""

import numpy as np

from lorawgpu.errors import UserError
from lorawgpu.ops.stores import STORES
from lorawgpu.weights.quantizers import TYPICAL_ERROR
from lorawgpu.weights.tensors import Checkpoint, Dense, Quantizable, Ternary, expected_tensors, is_linear


class QuantizedAtLoad(Checkpoint):
    """`base` with its linear layers in `store` (ops/stores.py); embedding and head stay as they are.

    UserError if they are quantized already. A matrix whose rows do not consist of whole blocks stays dense.
    """

    def __init__(self, base: Checkpoint, store: str, key: str) -> None:
        if base.config.ternary or base.quantized:
            advice = f"remove {key}, and if adapter is qlora, set it to lora"
            raise UserError(f"{base.name}: is quantized already; {advice}.")
        self.base, self.config, self.path, self.name = base, base.config, base.path, base.name
        self.norm_offset, self.options, self.own_tokenizer = base.norm_offset, base.options, base.own_tokenizer
        self._store, self._shapes = STORES[store], expected_tensors(base.config)

    def settings(self) -> bytes:
        return self.base.settings() + self._store.name.encode()

    def dense(self, name: str) -> Dense:
        return self.base.dense(name)

    def gather(self, name: str, ids: np.ndarray) -> Dense:
        return self.base.gather(name, ids)

    def matrix(self, name: str) -> Dense | Quantizable:
        if not self._is_quantized(name):
            return self.base.matrix(name)
        return Quantizable(self.base.dense(name), self._store.name, f"{self.path}: {name}")

    def store(self, name: str) -> str:
        return self._store.name if self._is_quantized(name) else self.base.store(name)

    def ternary(self, name: str) -> Ternary:
        return self.base.ternary(name)

    def tokenizer(self):
        return self.base.tokenizer()

    def summary(self) -> str:
        """How many matrices are quantized, their size, and the error that this makes."""
        linear = [name for name in self._shapes if is_linear(name)]
        count = sum(map(self._is_quantized, linear))
        store, error = self._store, TYPICAL_ERROR[self._store.name]
        return (
            f"{count} of {len(linear)} linear layers in {store.name} ({store.bits:g} bits a weight, rms error of "
            f"normally distributed weights {error:.1%} of their deviation)"
        )

    def _is_quantized(self, name: str) -> bool:
        return is_linear(name) and self._shapes[name][1] % self._store.block == 0
