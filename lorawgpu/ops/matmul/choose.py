"""The kernels for matrix products, and the choice between them."""

from functools import cache

from lorawgpu.ops.matmul import cooperative, tiled

KERNELS = (cooperative, tiled)  # best first; each has `supports(capabilities, form)` and `record(plan, problem)`


@cache
def kernel_for(capabilities, form):
    """The kernel for all products of this form on such a device, whatever their sizes. ValueError if there is none."""
    found = next((kernel for kernel in KERNELS if kernel.supports(capabilities, form)), None)
    if found is None:
        raise ValueError(f"no kernel supports {form} on a device with {capabilities}")
    return found


def matmul(plan, problem):
    """Record a `Problem` on the plan."""
    kernel_for(plan.device.capabilities, problem.form).record(plan, problem)
