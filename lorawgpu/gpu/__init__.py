"""The GPU layer: devices, tensors, kernels and replayed plans. Nothing here knows what a model is."""

from .device import Device, device_errors, open_device
from .dry import open_dry_device
from .kernel import KernelCache
from .plan import Plan
from .tensor import Tensor, padded
from .workspace import Workspace

__all__ = [
    "Device",
    "KernelCache",
    "Plan",
    "Tensor",
    "Workspace",
    "device_errors",
    "open_device",
    "open_dry_device",
    "padded",
]
