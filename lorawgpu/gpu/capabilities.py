"""The facts about a device that may decide which kernels an op picks and how it compiles them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Ops read these, never the adapter's name or type, so that equal devices get equal kernels."""

    software: bool  # runs on the CPU: unrolled code takes seconds to compile there and is not faster
    workgroup_memory: int  # bytes
    features: frozenset  # granted features, by wgpu's names
