"""The facts about a device that may decide which kernels an op picks and how it compiles them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixCores:
    """Products of f16 tiles with float32 sums that a subgroup computes together."""

    tile: int  # 16 or 8: rows, columns and terms of a tile
    lanes: int  # of a subgroup
    engine: str = "cooperative"  # or "plain": the same kernels in ordinary WGSL, for tests on any device
    fast: bool = False  # one product of rounded f16, instead of enough for float32


@dataclass(frozen=True)
class Capabilities:
    """Ops read these, never the adapter itself, so that equal devices get equal kernels."""

    software: bool  # runs on the CPU: unrolled code takes seconds to compile there and is not faster
    workgroup_memory: int  # bytes
    features: frozenset  # granted features, by wgpu's names
    kind: str = "Unknown"  # wgpu's adapter type: DiscreteGPU, IntegratedGPU, CPU
    vendor: int = 0  # PCI vendor id
    lanes: int = 0  # of a subgroup; 0 if they vary or the driver does not say
    matrix: MatrixCores | None = None  # None: the device has none, or the runtime does not grant them
