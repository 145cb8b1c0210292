"""The keys and values of all layers, kept from token to token. A sequence owns a span of slots (DESIGN section 2)."""

from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.gpu.tensor import Tensor, padded

SPAN_ALIGN = 128  # spans begin where attention's blocks of keys do, so a sequence has the same bits in any of them


@dataclass(frozen=True)
class KVCache:
    """One (k, v) pair of f32 [sequences * span, padded(NKV * HD)] a layer; sequence b owns span slots from b*span.

    Buffers begin as zeros and stay finite, which attention asks of slots that no row sees.
    """

    layers: tuple
    sequences: int
    span: int

    @staticmethod
    def create(device, config: ModelConfig, sequences: int, context: int) -> "KVCache":
        """Room for `sequences` sequences of `context` tokens. UserError when a layer's cache exceeds one binding."""
        span = padded(context, SPAN_ALIGN)
        shapes = [(sequences * span, padded(layer.attention.kv_width)) for layer in config.layers]
        if (nbytes := max(4 * rows * width for rows, width in shapes)) > device.max_binding:
            raise UserError(
                f"a KV cache for {sequences} x {context} tokens needs {nbytes:,} bytes a layer in one binding, "
                f"{device.name} allows {device.max_binding:,}: ask for fewer sequences or a shorter context"
            )

        def one(name: str, shape: tuple) -> Tensor:
            return device.tensor(shape, label=name, kind="kv cache")

        layers = tuple((one(f"k {i}", shape), one(f"v {i}", shape)) for i, shape in enumerate(shapes))
        return KVCache(layers, sequences, span)

    def first(self, sequence: int) -> int:
        """The first slot of a sequence."""
        return sequence * self.span
