"""LoRA fine-tuning with the exact gradient on any GPU that wgpu reaches."""

from lorawgpu.errors import UserError

__version__ = "0.1.0"
__all__ = ["Sampling", "UserError", "load"]


def __getattr__(name: str):
    """`load` and `Sampling`, imported on first use: code that only reads files and data must not need wgpu."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lorawgpu.api import model

    return getattr(model, name)
