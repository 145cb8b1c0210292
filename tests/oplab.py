"""For op tests: the laboratory that `lorawgpu doctor` uses too, and a comparison of its outputs."""

from copy import copy

import numpy as np

from lorawgpu.doctor.check import Case, measure
from lorawgpu.doctor.lab import GUARD, POISON, SPARE_ROWS, Lab, Output, normal, pad

__all__ = ["GUARD", "POISON", "SPARE_ROWS", "Lab", "Output", "assert_case", "assert_close", "limited", "normal", "pad"]


def assert_close(got, want, rtol, atol=0.0):
    """Like numpy's, and the padding past `want`'s columns must be zero."""
    width = want.shape[-1]
    assert not got[..., width:].any(), "the padding of a row is not zero"
    np.testing.assert_allclose(got[..., :width], want, rtol=rtol, atol=atol)


def assert_case(plan, record, *args, tolerance=2e-6):
    """A check of `lorawgpu doctor` at sizes of its own. The default is a few roundings of float32, and sums of some
    hundred terms; a lost term is off by 1e-2."""
    error, worst = measure(Case(record.__name__, record, tolerance, args), Lab(plan))
    assert error <= tolerance, f"{worst} is off by {error:.1e}"


def limited(device, nbytes):
    """The same device, with bindings of at most `nbytes`."""
    small = copy(device)
    small.limits = device.limits | {"max-storage-buffer-binding-size": nbytes}
    return small
