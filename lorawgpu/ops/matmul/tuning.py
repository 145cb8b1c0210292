"""What depends on how large a GPU is: how many workgroups keep it busy. A table, by what a device says of itself.

Nothing is timed at start-up, so that a run has the same bits whenever it is started on a device; another version of
this package may change them. A field report (`lorawgpu bench`) becomes one more line, above those that it refines.
"""

from dataclasses import dataclass

from lorawgpu.gpu.capabilities import Capabilities

DISCRETE, INTEGRATED, SOFTWARE = "DiscreteGPU", "IntegratedGPU", "CPU"  # wgpu's adapter types
NVIDIA, AMD, INTEL, APPLE = 0x10DE, 0x1002, 0x8086, 0x106B  # PCI vendor ids


@dataclass(frozen=True)
class Tuning:
    """Workgroups of products: `busy`, with medium tiles, keep the device busy; over `spread` of them a gradient of few
    rows is spread; a long gradient is cut further, to at most `waves`."""

    busy: int
    spread: int
    waves: int


@dataclass(frozen=True)
class Line:
    """A tuning and why, for devices of this type and vendor, with so many lanes in a subgroup and at least so much
    workgroup memory; None is any."""

    tuning: Tuning
    why: str
    kind: str | None = None
    vendor: int | None = None
    lanes: int | None = None
    memory: int = 0

    def fits(self, device: Capabilities) -> bool:
        wanted = ((self.kind, device.kind), (self.vendor, device.vendor), (self.lanes, device.lanes))
        return all(want in (None, has) for want, has in wanted) and device.workgroup_memory >= self.memory


LARGE = Tuning(busy=400, spread=800, waves=6144)
# The first line that fits a device counts.
TABLE = (
    Line(LARGE, "measured on an H200, 132 multiprocessors: 3, 6 and 46 workgroups each", DISCRETE, NVIDIA),
    Line(
        Tuning(busy=120, spread=240, waves=1856),
        "not measured: as many for each of 40 compute units, the most of an integrated GPU (Radeon 8060S, M3 Max); "
        "more splits would only write and read more sums, in memory that the CPU shares",
        INTEGRATED,
    ),
    Line(
        LARGE, "the same as a large GPU, so that tests run what it runs: a core has one workgroup at a time", SOFTWARE
    ),
    Line(LARGE, "not measured: with too few workgroups a large GPU idles; with too many, a small one loses little"),
)


def tuning_of(device: Capabilities) -> Tuning:
    """The tuning of the first line of TABLE that fits."""
    return line_of(device).tuning


def line_of(device: Capabilities) -> Line:
    return next(line for line in TABLE if line.fits(device))
