"""The norms of q and k against the reference."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import EPS, qk_norm
from lorawgpu.ops.qk_norm import qk_norm_forward


def test_matches_reference(plan):
    check(plan, qk_norm, (3, 3, 1, 10), (1, 1, 1, 2), (5, 4, 4, 8), (2, 9, 3, 64), (2, 20, 5, 128), (2, 2, 1, 256))


def test_small_values(plan):
    """Rows so small that eps matters."""
    check(plan, qk_norm, (3, 3, 1, 10), gain=3e-3)


def test_more_heads_than_one_grid_dimension(plan):
    check(plan, qk_norm, (8200, 4, 2, 4))


def test_parts_that_overlap_are_refused(plan):
    lab = Lab(plan)
    x, y, w = lab.input(normal(2, 32)), lab.output(2, 32), lab.input(np.ones(16, np.float32))
    sizes = {"rows": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "eps": EPS}
    with lab.section, pytest.raises(ValueError, match="32 columns do not hold q, k from 8"):
        qk_norm_forward(plan, y.tensor, x, w, w, k_off=8, v_off=24, **sizes)
