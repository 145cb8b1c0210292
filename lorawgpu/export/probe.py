"""Checks on the device that an export changes the logits of a fixed input as our adapter does."""

import numpy as np

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.readings import settled
from lorawgpu.errors import CheckFailed
from lorawgpu.export.effect import WeightChange, as_tensors
from lorawgpu.export.source import ExportSource
from lorawgpu.gpu import KernelCache
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.weights.device_model import load_model

TOKENS = 32
# Dense: B may be rounded differently in float32. BitNet: a single int8 rounding that flips moves logits by about 5e-3.
DENSE_TOLERANCE, TERNARY_TOLERANCE = 1e-4, 5e-2


class Probe:
    """The base model with our adapter on a device, and the logits of the fixed input with and without the adapter."""

    def __init__(self, source: ExportSource, device, kernels=None):
        self.source, self.device, self.kernels = source, device, kernels or KernelCache(device)
        self.model = load_model(device, settled(device, source.checkpoint))
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
        """Run with the adapter that was read back; returns the error of the logits. Raises CheckFailed if too large."""
        self.engine.load("params", as_tensors(self.source.lora, effect))
        theirs = self._logits(self.engine)
        self.engine.load("params", self.source.tensors)
        ternary = self.source.config.ternary
        return self._judge(theirs, TERNARY_TOLERANCE if ternary else min(DENSE_TOLERANCE, self.effect))

    def merged(self, checkpoint) -> str:
        """The same for a merged model: at least half of the adapter's effect must survive rounding."""
        theirs = self._logits(self._engine(load_model(self.device, checkpoint)))
        return self._judge(
            theirs, self.effect / 2, "; rounding to the base's dtype removes the adapter: serve it unmerged"
        )

    def rounded(self, checkpoint) -> str:
        """What rounding to the types of a file does to the logits of a merged model. It is the user's choice."""
        error = relative(self._logits(self._engine(load_model(self.device, checkpoint))), self.ours)
        return f"logits of {TOKENS} tokens: {error:.1e} from ours; the adapter's effect is {self.effect:.1e}"

    def _judge(self, theirs: np.ndarray, tolerance: float, advice: str = "") -> str:
        error = relative(theirs, self.ours)
        note = f"logits of {TOKENS} tokens: {error:.1e} from ours; the adapter's effect is {self.effect:.1e}"
        if not error <= tolerance:
            raise CheckFailed(f"read back, the export gives other logits than our adapter: {note}{advice}")
        return note


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||."""
    return float(np.linalg.norm((got - want).astype(np.float64)) / np.linalg.norm(want.astype(np.float64)))
