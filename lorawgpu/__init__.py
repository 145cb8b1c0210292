"""LoRA fine-tuning with the exact gradient on any GPU that wgpu reaches."""

__version__ = "0.1.0"
