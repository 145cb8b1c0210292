"""How much work a submit may hold so that no watchdog fires: a guess by kind of device, then what was measured."""

# Operations a second to expect before anything was measured: low for its kind, since a watchdog does not forgive.
FIRST_RATE = {"DiscreteGPU": 2e12, "IntegratedGPU": 1e11, "CPU": 5e9}
UNKNOWN_RATE = 1e11
HEADROOM = 2.0  # single kernels are that much slower than the average that is measured


def flops_per_submit(rate: float, max_dispatch_ms: float) -> float:
    """Operations of one submit that stay within the limit at `rate` operations a second."""
    return rate * max_dispatch_ms / 1000 / HEADROOM


def first_rate(device) -> float:
    return FIRST_RATE.get(device.info["adapter_type"], UNKNOWN_RATE)
