"""For op tests: the laboratory that `lorawgpu doctor` uses too, and a comparison of its outputs."""

import numpy as np

from lorawgpu.doctor.lab import GUARD, POISON, SPARE_ROWS, Lab, Output, normal, pad

__all__ = ["GUARD", "POISON", "SPARE_ROWS", "Lab", "Output", "assert_close", "normal", "pad"]


def assert_close(got, want, rtol, atol=0.0):
    """Like numpy's, and the padding past `want`'s columns must be zero."""
    width = want.shape[-1]
    assert not got[..., width:].any(), "the padding of a row is not zero"
    np.testing.assert_allclose(got[..., :width], want, rtol=rtol, atol=atol)
