"""LoRA fine-tuning with the exact gradient on any GPU that wgpu reaches."""

__version__ = "0.1.0"
__all__ = ["Sampling", "load"]


def __getattr__(name: str):
    """`load` and `Sampling`, found on first use: code that only reads files and data must not need wgpu."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lorawgpu.api import model as api

    return getattr(api, name)
