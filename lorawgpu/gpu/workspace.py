"""Scratch and activation buffers, reused by lifetime while plans are recorded."""

from contextlib import contextmanager
from math import prod

import numpy as np

from lorawgpu.gpu.tensor import DTYPES, Tensor, padded

WASTE = 2  # a buffer may be at most this many times larger than the tensor it is taken for


class Workspace:
    """`take` a tensor; `give` it back once the records that read it are recorded. A later take may get its buffer.

    This is safe because dispatches run in recording order. After `rewind`, plans for smaller capacities reuse the same
    buffers, so record the largest plan first.
    """

    def __init__(self, device, kind="activations"):
        self.device, self.kind = device, kind
        self._all, self._free, self._used = [], [], {}
        self._waste = WASTE

    def take(self, shape, dtype="f32", label="", kept=False) -> Tensor:
        """A tensor with undefined contents, in the smallest free buffer that fits and wastes at most half.

        `kept`: the tensor stays in use for the rest of the plan, so no larger buffer is wasted on it.
        """
        nbytes = padded(prod(shape) * np.dtype(DTYPES[dtype]).itemsize, 256)
        waste = 1 if kept and self._waste == WASTE else self._waste
        fits = [(size, i) for i, (size, _) in enumerate(self._free) if nbytes <= size <= waste * nbytes]
        if fits:
            size, buffer = self._free.pop(min(fits)[1])
        else:
            size, buffer = nbytes, self.device.buffer(nbytes, label, self.kind)
            self._all.append((size, buffer))
        self._used[id(buffer)] = (size, buffer)
        return Tensor(buffer, tuple(shape), dtype, 0, label)

    def give(self, *tensors: Tensor):
        """Give tensors back. ValueError if one was not taken, or was given back twice."""
        for t in tensors:
            if id(t.buffer) not in self._used:
                raise ValueError(f"{t.label} was not taken from this workspace, or given back twice")
            self._free.append(self._used.pop(id(t.buffer)))

    @contextmanager
    def reuse_only(self):
        """Inside this context, reuse any free buffer that fits, however large: for short-lived tensors."""
        waste, self._waste = self._waste, float("inf")
        try:
            yield
        finally:
            self._waste = waste

    def rewind(self):
        """Free all buffers for the next plan."""
        self._free, self._used = list(self._all), {}
        if self._all:
            self._waste = float("inf")  # in a smaller plan, an oversized buffer is better than a new one
