"""The GPU layer: devices, tensors, kernels and replayed plans. Nothing here knows what a model is."""

from lorawgpu.gpu.device import Device, GPUError, device_errors, open_device
from lorawgpu.gpu.dry import open_dry_device
from lorawgpu.gpu.kernel import KernelCache
from lorawgpu.gpu.plan import Plan
from lorawgpu.gpu.readback import Readback
from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.gpu.workspace import Workspace

__all__ = [
    "Device",
    "GPUError",
    "KernelCache",
    "Plan",
    "Readback",
    "Tensor",
    "Workspace",
    "device_errors",
    "open_device",
    "open_dry_device",
    "padded",
]
