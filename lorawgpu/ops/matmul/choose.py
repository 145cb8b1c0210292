"""The kernels for matrix products, and the choice among them."""

from functools import cache

from lorawgpu.ops.matmul import tiled

KERNELS = (tiled,)  # the best first; each offers `supports(capabilities, form)` and `record(plan, problem)`


@cache
def kernel_for(capabilities, form):
    """The kernel of all products of this form on such a device, whatever their sizes. ValueError when there is none."""
    found = next((kernel for kernel in KERNELS if kernel.supports(capabilities, form)), None)
    if found is None:
        raise ValueError(f"no kernel computes {form} on a device with {capabilities}")
    return found


def matmul(plan, problem):
    """Record a `Problem` on the plan."""
    kernel_for(plan.device.capabilities, problem.form).record(plan, problem)
