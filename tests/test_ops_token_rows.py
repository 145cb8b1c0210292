"""Trained rows and columns: sums over repeated ids in their order, tails and other ids left alone."""

import numpy as np
from oplab import Lab, check, normal

from lorawgpu.doctor.token_rows import token_columns, token_rows
from lorawgpu.ops.token_rows import rows_backward


def test_rows(plan):
    check(plan, token_rows, (2, 16), (9, 123, 0.3), (300, 2560))


def test_columns(plan):
    check(plan, token_columns, (1, 4), (70, 97))


def test_a_sum_is_in_the_order_of_positions(plan):
    """Bit for bit that of one float32 addition after another."""
    dx, ids = normal(500, 16), np.zeros(500, np.int32)
    lab = Lab(plan)
    with lab.section:
        out = lab.rows(1, 16, np.zeros((1, 16)))
        lists = lab.input(ids), lab.input(np.arange(500, dtype=np.int32))
        rows_backward(lab.plan, out.exact, lab.padded(dx), *lists, rows=500, width=16)
    lab.run()
    want = np.zeros(16, np.float32)
    for row in dx.astype(np.float32):
        want += row
    np.testing.assert_array_equal(out.value[0], want)
