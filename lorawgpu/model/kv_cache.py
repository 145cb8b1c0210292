"""The keys and values of all layers. See docs/DESIGN.md, "Tokens, slots and the KV cache"."""

from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.families.config import ModelConfig
from lorawgpu.gpu.tensor import Tensor, padded

SPAN_ALIGN = 128  # slots; spans begin at multiples of this


@dataclass(frozen=True)
class KVCache:
    """One (k, v) pair of f32 [sequences * span, padded(NKV * HD)] per layer; some layers share one.

    Sequence b owns slots [b * span, (b + 1) * span). Buffers start as zeros and stay finite, as attention requires of
    slots that no row sees.
    """

    layers: tuple
    span: int

    @staticmethod
    def create(device, config: ModelConfig, sequences: int, context: int) -> "KVCache":
        """A cache for `sequences` sequences of `context` tokens. UserError if a layer's cache exceeds one binding."""
        span = padded(context, SPAN_ALIGN)
        shapes = [(sequences * span, padded(layer.attention.kv_width)) for layer in config.layers]
        if (nbytes := max(4 * rows * width for rows, width in shapes)) > device.max_binding:
            raise UserError(
                f"a KV cache for {sequences} x {context} tokens needs {nbytes:,} bytes per layer in one binding, "
                f"{device.name} allows {device.max_binding:,}: use fewer sequences or a shorter context"
            )

        def one(name: str, shape: tuple) -> Tensor:
            return device.tensor(shape, label=name, kind="kv cache")

        layers = []
        for i, (layer, shape) in enumerate(zip(config.layers, shapes, strict=True)):
            shares = layer.attention.shares
            layers.append(layers[shares] if shares is not None else (one(f"k {i}", shape), one(f"v {i}", shape)))
        return KVCache(tuple(layers), span)
