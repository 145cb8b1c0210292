"""For op tests: the `Lab` and checks of `lorawgpu doctor`, at other sizes."""

from copy import copy

import numpy as np

from lorawgpu.doctor.check import error_of
from lorawgpu.doctor.kernels import TOLERANCES
from lorawgpu.doctor.lab import GUARD, POISON, SPARE_ROWS, Lab, Output, normal, pad

__all__ = [
    "GUARD", "POISON", "SPARE_ROWS", "Lab", "Output",
    "assert_close", "assert_right", "check", "limited", "normal", "pad",
]  # fmt: skip


def check(plan, record, *sizes, tolerance=None, **options):
    """What doctor's function `record` records, at each of these sizes (tuples) and all in one submit.

    options: keywords of `record`. tolerance: doctor's own for `record` unless given.
    """
    lab = Lab(plan)
    with lab.section:
        recorded = [(size, record(lab, *size, **options)) for size in sizes]
    lab.run()
    for size, results in recorded:
        assert_right(results(), TOLERANCES[record] if tolerance is None else tolerance, f"{record.__name__}{size}")


def assert_right(results, tolerance, what=""):
    """results: {name: (got, want)}, as the functions of doctor's checks return them after a run."""
    errors = {name: error_of(got, want) for name, (got, want) in results.items()}
    wrong = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    assert not wrong, f"{what}: {', '.join(wrong)}; {tolerance:.0e} may be"


def assert_close(got, want, rtol, atol=0.0):
    """Like numpy's, and the padding past `want`'s columns must be zero."""
    width = want.shape[-1]
    assert not got[..., width:].any(), "the padding of a row is not zero"
    np.testing.assert_allclose(got[..., :width], want, rtol=rtol, atol=atol)


def limited(device, nbytes):
    """The same device, with bindings of at most `nbytes`."""
    small = copy(device)
    small.limits = device.limits | {"max-storage-buffer-binding-size": nbytes}
    return small
