"""Does an export change what the model says as our adapter does? Logits of a fixed input, on the device."""

import numpy as np

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.errors import CheckFailed
from lorawgpu.export.effect import WeightChange, as_tensors
from lorawgpu.export.source import ExportSource
from lorawgpu.gpu import KernelCache
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.weights.device_model import load_model

TOKENS = 32
# Dense: float32 of another rounding of B. BitNet: one int8 rounding that flips moves logits by about 5e-3.
DENSE_TOLERANCE, TERNARY_TOLERANCE = 1e-4, 5e-2


class Probe:
    """The base with our adapter on a device, and its logits of the fixed input with and without it."""

    def __init__(self, source: ExportSource, device, kernels=None):
        self.source, self.device, self.kernels = source, device, kernels or KernelCache(device)
        self.model = load_model(device, source.checkpoint)
        layout = AdapterLayout(source.lora, source.config)
        self.engine = self._engine(self.model, layout)
        self.ours = self._logits(self.engine)
        self.engine.load("params", {name: np.zeros_like(t) for name, t in source.tensors.items()})
        self.base = self._logits(self.engine)
        self.engine.load("params", source.tensors)
        self.effect = relative(self.ours, self.base)

    def _engine(self, model, layout=None) -> Engine:
        tensors = self.source.tensors if layout else None
        return Engine(self.device, model, Options(TOKENS, TOKENS), layout, tensors, kernels=self.kernels)

    def _logits(self, engine: Engine) -> np.ndarray:
        ids = (np.arange(TOKENS) * 7919 % self.source.config.vocab_size).astype(np.int32)
        return engine.logits(flatten([Sample(ids, ids)], TOKENS), np.arange(TOKENS))

    def adapter(self, effect: dict[str, WeightChange]) -> str:
        """Run with what was read back, and say how far it is from ours. CheckFailed when that is too much."""
        self.engine.load("params", as_tensors(self.source.lora, effect))
        theirs = self._logits(self.engine)
        self.engine.load("params", self.source.tensors)
        ternary = self.source.config.ternary
        return self._judge(theirs, TERNARY_TOLERANCE if ternary else min(DENSE_TOLERANCE, self.effect))

    def merged(self, checkpoint) -> str:
        """As `adapter`, of a merged model: at least half of what the adapter does must outlive the rounding."""
        theirs = self._logits(self._engine(load_model(self.device, checkpoint)))
        return self._judge(theirs, self.effect / 2, "; rounding takes the adapter away: serve it unmerged")

    def _judge(self, theirs: np.ndarray, tolerance: float, advice: str = "") -> str:
        error = relative(theirs, self.ours)
        said = f"logits of {TOKENS} tokens: {error:.1e} from ours, of which the adapter makes {self.effect:.1e}"
        if not error <= tolerance:
            raise CheckFailed(f"the export, read back, does not say what our adapter says: {said}{advice}")
        return said


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||."""
    return float(np.linalg.norm((got - want).astype(np.float64)) / np.linalg.norm(want.astype(np.float64)))
