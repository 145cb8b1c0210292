"""The slots of a KV cache that sequences of any length share: each owns one range of them."""

from lorawgpu.gpu.tensor import padded
from lorawgpu.model.kv_cache import SPAN_ALIGN


class Slots:
    """Lends ranges of `count` slots, first fit. Ranges begin at multiples of SPAN_ALIGN, and so do the free ones."""

    def __init__(self, count: int):
        self.count = count // SPAN_ALIGN * SPAN_ALIGN
        self._free = [range(self.count)]  # in order; no two of them touch

    def take(self, tokens: int) -> range | None:
        """A range of at least `tokens` slots, None if none is free."""
        wanted = padded(tokens, SPAN_ALIGN)
        for i, free in enumerate(self._free):
            if len(free) >= wanted:
                self._free[i : i + 1] = [rest] if (rest := free[wanted:]) else []
                return free[:wanted]
        return None

    def give(self, taken: range) -> None:
        """Give a range back."""
        merged: list[range] = []
        for free in sorted([*self._free, taken], key=lambda r: r.start):
            if merged and merged[-1].stop == free.start:
                merged[-1] = range(merged[-1].start, free.stop)
            else:
                merged.append(free)
        self._free = merged
