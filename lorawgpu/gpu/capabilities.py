"""The facts about a device that ops may choose and compile kernels by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Ops read these instead of the adapter's name or type, so that equal devices get equal kernels."""

    software: bool  # the adapter runs on the CPU: it takes seconds to compile unrolled code, which runs no faster
    workgroup_memory: int  # bytes
    features: frozenset  # wgpu's names of those granted
