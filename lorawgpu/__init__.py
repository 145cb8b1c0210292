"""LoRA fine-tuning with the exact gradient on any GPU that wgpu reaches."""

import importlib

from lorawgpu.errors import UserError

__version__ = "0.1.0"
__all__ = ["Sampling", "UserError", "load", "train"]


def __getattr__(name: str):
    """The Python API, imported on first use: code that only reads files and data must not need wgpu."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "train":
        return importlib.import_module("lorawgpu.train")  # which can be called
    return getattr(importlib.import_module("lorawgpu.api.model"), name)
