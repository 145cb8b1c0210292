"""The facts about a device that may decide which kernels an op picks and how it compiles them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Ops read these, never the adapter itself, so that equal devices get equal kernels."""

    software: bool  # runs on the CPU: unrolled code takes seconds to compile there and is not faster
    workgroup_memory: int  # bytes
    features: frozenset  # granted features, by wgpu's names
    kind: str = "Unknown"  # wgpu's adapter type: DiscreteGPU, IntegratedGPU, CPU
    vendor: int = 0  # PCI vendor id
    lanes: int = 0  # of a subgroup; 0 if they vary or the driver does not say
