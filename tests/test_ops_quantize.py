"""The int8 quantizer: bit-equal to the reference, with and without a norm."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import EPS, FRESH, quantize, rmsnorm_quantize
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward

SHAPES = ((3, 123), (1, 1), (2, 2560), (2, 6912), (5, 16))


def test_quantize_is_exact(plan):
    check(plan, quantize, *SHAPES, (12, 40))


@pytest.mark.parametrize("what", ["with rows", "codes"])
def test_rmsnorm_quantize(plan, what):
    check(plan, rmsnorm_quantize, *((what, *shape) for shape in SHAPES))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_input_marks_the_lowest_record(plan, value):
    lab = Lab(plan)
    bad, good = normal(2, 112), normal(2, 112)
    bad[1, 77] = value
    rstd, weight, state = lab.output(2), lab.input(np.ones(112, np.float32)), lab.output(16, initial=FRESH, dtype="u32")
    codes = [lab.output(2, size, dtype="u32").tensor for size in (28, 2)]
    shape = {"rows": 2, "width": 112}
    with lab.section:
        for record_id, x in ((9, bad), (2, good), (5, bad)):
            quantize_forward(plan, *codes, lab.input(x), state.tensor, record_id=record_id, **shape)
    lab.run()
    assert state.value[:2].tolist() == [1, 5]
    with lab.section:
        inputs = lab.input(bad), weight, state.tensor
        rmsnorm_quantize_forward(plan, None, rstd.tensor, *codes, *inputs, eps=EPS, record_id=1, **shape)
    lab.run()
    assert state.value[:2].tolist() == [1, 1]
