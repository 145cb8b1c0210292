"""Scratch and activation buffers reused by lifetime while plans are recorded."""

from contextlib import contextmanager
from math import prod

import numpy as np

from lorawgpu.gpu.tensor import DTYPES, Tensor, padded

WASTE = 2  # a buffer may be this much larger than what it is taken for


class Workspace:
    """`take` a tensor, `give` it back when the records that read it are recorded: later takes may get its buffer.

    Safe because dispatches run in the order they were recorded. Plans for smaller capacities, recorded after
    `rewind`, reuse the same buffers: record the largest plan first.
    """

    def __init__(self, device, kind="activations"):
        self.device, self.kind = device, kind
        self._all, self._free, self._used = [], [], {}
        self._waste = WASTE

    def take(self, shape, dtype="f32", label="", kept=False) -> Tensor:
        """A tensor with undefined contents, in the smallest free buffer that fits, unless it would waste over half.

        `kept`: it stays out for the rest of the plan, so it must not sit in a buffer larger than itself.
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
        """Return tensors. ValueError for one that is not out, or was given twice."""
        for t in tensors:
            if id(t.buffer) not in self._used:
                raise ValueError(f"{t.label} was not taken from this workspace, or given back twice")
            self._free.append(self._used.pop(id(t.buffer)))

    @contextmanager
    def frugal(self):
        """Inside, a take would rather waste the largest buffer than make another: for what is given back at once."""
        waste, self._waste = self._waste, float("inf")
        try:
            yield
        finally:
            self._waste = waste

    def rewind(self):
        """All buffers are free again, for the next plan."""
        self._free, self._used = list(self._all), {}
        if self._all:
            self._waste = float("inf")  # better a large buffer in a small plan than another one
