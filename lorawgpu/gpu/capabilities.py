"""What kernels may count on when they are chosen and compiled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """Of a device: all that an op may ask of it before it records, so that its choices are the same on the same kind.

    `software`: an adapter that runs on the CPU; it compiles for seconds what it then runs no faster unrolled.
    """

    software: bool
    workgroup_memory: int  # bytes
    features: frozenset  # wgpu's names of those granted
