"""RMSNorm kernels against the reference."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.ops.rmsnorm import rmsnorm_backward, rmsnorm_forward
from lorawgpu.reference import rmsnorm as reference

EPS = 1e-5
# float32 sums of up to 6912 terms: 1e-6 of the row's scale is about ten roundings.
RTOL, ATOL = 2e-6, 2e-6


def record(lab, rows, width):
    """Forward and both backwards of one shape; returns the check of their outputs."""
    x, dy, start = normal(rows, width) * 3, normal(rows, width, seed=1), normal(rows, width, seed=2)
    weight = normal(width, seed=3)
    gx, gdy, gw = lab.padded(x), lab.padded(dy), lab.input(pad(weight[None])[0])
    y, rstd = lab.rows(rows, width), lab.output(rows)
    dx, dx_sum = lab.rows(rows, width), lab.rows(rows, width, pad(start))
    shape = {"rows": rows, "width": width}
    rmsnorm_forward(lab.plan, y.tensor, rstd.tensor, gx, gw, eps=EPS, **shape)
    rmsnorm_backward(lab.plan, dx.tensor, gdy, gx, gw, rstd.tensor, accumulate=False, **shape)
    rmsnorm_backward(lab.plan, dx_sum.tensor, gdy, gx, gw, rstd.tensor, accumulate=True, **shape)

    def check():
        x64, dy64, w64 = (a.astype(np.float64) for a in (x, dy, weight))
        want, want_rstd = reference.rmsnorm_forward(x64, w64, EPS)
        want_dx = reference.rmsnorm_backward(dy64, x64, w64, want_rstd)
        assert_close(y.value, want, RTOL, ATOL)
        np.testing.assert_allclose(rstd.value, want_rstd, rtol=RTOL)
        assert_close(dx.value, want_dx, RTOL, ATOL)
        assert_close(dx_sum.value, want_dx + start, RTOL, ATOL)

    return check


def test_matches_reference(plan):
    lab = Lab(plan)
    with lab.section:
        checks = [record(lab, *shape) for shape in ((3, 123), (1, 1), (5, 16), (2, 576), (2, 2560), (3, 6912))]
    lab.run()
    for check in checks:
        check()


def test_more_rows_than_one_grid_dimension(plan):
    lab = Lab(plan)
    x = normal(65537, 3)
    y, rstd = lab.rows(65537, 3), lab.output(65537)
    with lab.section:
        rmsnorm_forward(
            plan,
            y.tensor,
            rstd.tensor,
            lab.padded(x),
            lab.input(pad(np.ones((1, 3), np.float32))[0]),
            rows=65537,
            width=3,
            eps=EPS,
        )
    lab.run()
    assert_close(y.value, reference.rmsnorm_forward(x.astype(np.float64), 1.0, EPS)[0], RTOL, ATOL)


def test_wrong_shapes_are_named(plan):
    lab = Lab(plan)
    x = lab.padded(normal(3, 20))
    y, rstd = lab.rows(3, 20), lab.output(2, label="rstd")
    with lab.section, pytest.raises(ValueError, match=r"weight.*\[16\].*wanted f32 \[32\]"):
        rmsnorm_forward(plan, y.tensor, rstd.tensor, x, lab.input(np.ones(16, np.float32)), rows=3, width=20, eps=EPS)
    with lab.section, pytest.raises(ValueError, match=r"x \(input\).*wanted f32 \[5, 32\]"):
        rmsnorm_forward(plan, y.tensor, rstd.tensor, x, lab.input(np.ones(32, np.float32)), rows=5, width=20, eps=EPS)
