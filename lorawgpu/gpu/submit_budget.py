"""How much work one submit may hold before a watchdog would fire: first an estimate, later from measured rates."""

# Operations per second assumed before anything is measured; deliberately low, because a watchdog kills the run.
FIRST_RATE = {"DiscreteGPU": 2e12, "IntegratedGPU": 1e11, "CPU": 5e9}
UNKNOWN_RATE = 1e11
HEADROOM = 2.0  # single kernels may be this much slower than the measured average


def flops_per_submit(rate: float, max_dispatch_ms: float) -> float:
    """Operations that a submit may hold to finish within `max_dispatch_ms` at `rate` operations per second."""
    return rate * max_dispatch_ms / 1000 / HEADROOM


def first_rate(device) -> float:
    return FIRST_RATE.get(device.info["adapter_type"], UNKNOWN_RATE)
