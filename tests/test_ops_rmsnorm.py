"""RMSNorm kernels against the reference."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import EPS, rmsnorm
from lorawgpu.ops.rmsnorm import rmsnorm_forward


def test_matches_reference(plan):
    check(plan, rmsnorm, (3, 123), (1, 5), (5, 16), (3, 42), (2, 34), (2, 28), (2, 60), (2, 576), (2, 2560), (3, 6912))


def test_scale_of_the_sum_with_a_residual(plan):
    check(plan, rmsnorm, (3, 123, 0.0617), (1, 5, -2.0), (2, 42, 7.5), (2, 1536, 0.5), (130, 2560, 0.9))


def test_a_scale_without_a_residual_is_refused(plan):
    lab = Lab(plan)
    y, rstd, x, weight = lab.rows(3, 20), lab.output(3), lab.padded(normal(3, 20)), lab.input(np.ones(32, np.float32))
    with lab.section, pytest.raises(ValueError, match="out_scale multiplies a sum with a residual"):
        rmsnorm_forward(plan, y.tensor, rstd.tensor, x, weight, rows=3, width=20, eps=EPS, out_scale=0.5)


def test_small_values(plan):
    """Values so small that eps matters; then dx of a single column is more than rounding error."""
    check(plan, rmsnorm, (3, 123), (1, 1), gain=3e-3)


def test_more_rows_than_one_grid_dimension(plan):
    check(plan, rmsnorm, (65537, 3))


def test_wrong_shapes_are_named(plan):
    lab = Lab(plan)
    x = lab.padded(normal(3, 20))
    y, rstd = lab.rows(3, 20), lab.output(2, label="rstd")
    with lab.section, pytest.raises(ValueError, match=r"weight.*\[16\].*wanted f32 \[32\]"):
        rmsnorm_forward(plan, y.tensor, rstd.tensor, x, lab.input(np.ones(16, np.float32)), rows=3, width=20, eps=EPS)
    with lab.section, pytest.raises(ValueError, match=r"x \(input\).*wanted f32 \[5, 32\]"):
        rmsnorm_forward(plan, y.tensor, rstd.tensor, x, lab.input(np.ones(32, np.float32)), rows=5, width=20, eps=EPS)
