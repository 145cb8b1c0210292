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
from lorawgpu.train.held_out import HeldOut
from lorawgpu.weights.device_model import load_model

TOKENS = 32
# Dense: B may be rounded differently in float32. BitNet: a single int8 rounding that flips moves logits by about 5e-3.
DENSE_TOLERANCE, TERNARY_TOLERANCE = 1e-4, 5e-2


class Probe:
    """The base model with our adapter on a device, and the logits of the fixed input with and without the adapter.

    held_out: data on which the losses of base, adapter and export are compared as well.
    """

    def __init__(self, source: ExportSource, device, kernels=None, held_out: HeldOut | None = None):
        self.source, self.device, self.kernels = source, device, kernels or KernelCache(device)
        self.held_out = held_out
        self.model = load_model(device, settled(device, source.checkpoint))
        self.layout = AdapterLayout(source.lora, source.config)
        self.engine = self._engine(self.model, self.layout)
        self.ours = self._logits(self.engine)
        self.base = self._logits(self.engine, adapter=False)
        self.effect = relative(self.ours, self.base)

    def _engine(self, model, layout=None) -> Engine:
        tensors = self.source.tensors if layout else None
        return Engine(self.device, model, Options(TOKENS, TOKENS), layout, tensors, kernels=self.kernels)

    def _logits(self, engine: Engine, adapter: bool = True) -> np.ndarray:
        ids = (np.arange(TOKENS) * 7919 % self.source.config.vocab_size).astype(np.int32)
        return engine.logits(flatten([Sample(ids, ids)], TOKENS), np.arange(TOKENS), adapter)

    def adapter(self, effect: dict[str, WeightChange]) -> list[str]:
        """Run with the adapter that was read back; returns the error of the logits, and the losses.

        CheckFailed if the error is too large.
        """
        read = self.source.ends | as_tensors(self.source.lora, effect)
        self.engine.load("params", read)
        theirs = self._logits(self.engine)
        self.engine.load("params", self.source.tensors)
        ternary = self.source.config.ternary
        note = self._judge(theirs, TERNARY_TOLERANCE if ternary else min(DENSE_TOLERANCE, self.effect))
        return [note, *self._losses(self.model, read)]

    def merged(self, checkpoint) -> list[str]:
        """The same for a merged model: at least half of the adapter's effect must survive rounding."""
        model = load_model(self.device, checkpoint)
        advice = "; rounding to the base's dtype removes the adapter: serve it unmerged"
        note = self._judge(self._logits(self._engine(model)), self.effect / 2, advice)
        return [note, *self._losses(model)]

    def rounded(self, checkpoint) -> list[str]:
        """What rounding to the types of a file does to a merged model: to its logits, and to the loss. It is the user's
        choice."""
        model = load_model(self.device, checkpoint)
        error = relative(self._logits(self._engine(model)), self.ours)
        note = f"logits of {TOKENS} tokens: {error:.1e} from ours; the adapter's effect is {self.effect:.1e}"
        return [note, *self._losses(model)]

    def _losses(self, model, tensors=None) -> list[str]:
        """The held-out loss of the export, `model` and what `tensors` add, next to those of base and adapter."""
        if self.held_out is None:
            return []

        def engine_of(model, tensors):
            layout = self.layout if tensors else None
            return self.held_out.engine(self.device, model, layout, tensors, self.kernels)

        engine = engine_of(self.model, self.source.tensors)
        base, ours = (self.held_out.loss(engine, adapter) for adapter in (False, True))
        theirs = self.held_out.loss(engine_of(model, tensors))
        return [
            f"held-out loss ({ours.tokens:,} target tokens): base {base.loss:.4f}, with the adapter {ours.loss:.4f}, "
            f"exported {theirs.loss:.4f} ({theirs.loss - ours.loss:+.4f})"
        ]

    def _judge(self, theirs: np.ndarray, tolerance: float, advice: str = "") -> str:
        error = relative(theirs, self.ours)
        note = f"logits of {TOKENS} tokens: {error:.1e} from ours; the adapter's effect is {self.effect:.1e}"
        if not error <= tolerance:
            raise CheckFailed(f"read back, the export gives other logits than our adapter: {note}{advice}")
        return note


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||."""
    return float(np.linalg.norm((got - want).astype(np.float64)) / np.linalg.norm(want.astype(np.float64)))
