"""The per-layer input against the reference: every store of the table's rows, widths that are no multiple of 4."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import EPS, per_layer
from lorawgpu.ops.per_layer import per_layer_forward
from lorawgpu.ops.stores import F32, TERNARY


@pytest.mark.parametrize("store", ["f32", "bf16", "f16"])
def test_matches_reference(plan, store):
    check(plan, per_layer, (store, 3, 10), (store, 1, 1), (store, 5, 42), (store, 7, 256), (store, 2, 300))


def test_small_projections(plan):
    """Values so small that eps matters: it is added after the scale."""
    check(plan, per_layer, ("bf16", 3, 10), gain=0.02)


def test_rows_of_another_stride_and_store_are_refused(plan):
    lab, ones = Lab(plan), np.ones(16, np.float32)
    y, proj, shape = lab.rows(3, 10), lab.padded(normal(3, 10)), {"rows": 3, "width": 10, "scale": 1.0, "eps": EPS}
    with lab.section, pytest.raises(ValueError, match=r"table_rows.*wanted f32 \[3, 16\]"):
        per_layer_forward(plan, y.tensor, proj, lab.input(normal(3, 10)), lab.input(ones), store=F32, **shape)
    with lab.section, pytest.raises(ValueError, match="rows of a ternary table cannot be looked up"):
        per_layer_forward(plan, y.tensor, proj, proj, lab.input(ones), store=TERNARY, **shape)
