"""The int8 quantiser: bit-equal to the reference, alone and behind a norm."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.gpu import padded
from lorawgpu.ops.quantize import quantize_forward, rmsnorm_quantize_forward
from lorawgpu.reference.quantize import quantize_forward as reference
from lorawgpu.reference.rmsnorm import rmsnorm_forward

EPS = 1e-5
SHAPES = ((3, 123), (1, 1), (2, 2560), (2, 6912), (5, 16))


def outputs(lab, rows, width):
    return lab.output(rows, padded(width) // 4, dtype="u32"), lab.output(rows, 2, dtype="u32")


def check_against(xq, qscale, v):
    """xq and both words of qscale against the float32 reference of v [rows, width]."""
    want, s = reference(v)
    got = xq.value.view(np.int8)
    assert_close(got, want, 0)
    assert np.array_equal(qscale.value[:, 0].view(np.float32), np.float32(1) / s)
    assert np.array_equal(qscale.value[:, 1].view(np.int32), want.astype(np.int32).sum(-1))


def awkward(rows, width):
    """Normal rows of very different sizes, one of zeros, one of ties: max 127 makes s = 1, so k + 0.5 is a tie."""
    x = normal(rows, width) * 10.0 ** np.arange(-6, rows - 6)[:, None].astype(np.float32)
    if rows > 2:
        x[0] = 0
        x[1] = np.arange(width) % 128 - 63.5
        x[1, 0] = 127
    return x


def test_quantize_is_exact(plan):
    lab, checks = Lab(plan), []
    state = lab.state()
    with lab.section:
        for shape in SHAPES + ((12, 40),):
            x, out = awkward(*shape), outputs(lab, *shape)
            quantize_forward(
                plan, *(o.tensor for o in out), lab.padded(x), state.tensor, rows=shape[0], width=shape[1], record_id=3
            )
            checks.append((out, x))
    lab.run()
    for out, x in checks:
        check_against(*out, x)
    assert not state.value.any()


@pytest.mark.parametrize("keep", [True, False])
def test_rmsnorm_quantize(plan, keep):
    """With y kept, the codes are exactly those of y; without, they may differ where a fraction is near a tie."""
    lab, checks = Lab(plan), []
    state = lab.state()
    with lab.section:
        for rows, width in SHAPES:
            x, weight = normal(rows, width) * 50, normal(width, seed=1)
            y, rstd, out = lab.rows(rows, width), lab.output(rows), outputs(lab, rows, width)
            rmsnorm_quantize_forward(
                plan,
                y.tensor if keep else None,
                rstd.tensor,
                *(o.tensor for o in out),
                lab.padded(x),
                lab.input(pad(weight[None])[0]),
                state.tensor,
                rows=rows,
                width=width,
                eps=EPS,
                record_id=0,
            )
            checks.append((y, rstd, out, rmsnorm_forward(x.astype(np.float64), weight.astype(np.float64), EPS)))
    lab.run()
    for y, rstd, (xq, qscale), (want, want_rstd) in checks:
        np.testing.assert_allclose(rstd.value, want_rstd, rtol=2e-6)  # a float32 sum of up to 6912 squares
        if keep:
            assert_close(y.value, want, 2e-6, 2e-6)
            check_against(xq, qscale, y.value[:, : want.shape[1]])
        codes, s = reference(want)
        near_tie = np.abs(np.abs(want * s[:, None]) % 1 - 0.5) < 1e-4
        wrong = xq.value.view(np.int8)[:, : want.shape[1]] != codes
        assert not (wrong & ~near_tie).any()
    assert not state.value.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_input_marks_the_lowest_record(plan, value):
    lab = Lab(plan)
    state = lab.output(16, initial=[0, 0xFFFFFFFF] + 14 * [0], dtype="u32")
    bad, good = normal(2, 100), normal(2, 100)
    bad[1, 77] = value
    rstd, weight = lab.output(2), lab.input(np.ones(112, np.float32))
    shape = {"rows": 2, "width": 100}
    with lab.section:
        for record_id, x in ((9, bad), (2, good), (5, bad)):
            quantize_forward(
                plan,
                *(o.tensor for o in outputs(lab, 2, 100)),
                lab.padded(x),
                state.tensor,
                record_id=record_id,
                **shape,
            )
    lab.run()
    assert state.value[:2].tolist() == [1, 5]
    with lab.section:
        rmsnorm_quantize_forward(
            plan,
            None,
            rstd.tensor,
            *(o.tensor for o in outputs(lab, 2, 100)),
            lab.padded(bad),
            weight,
            state.tensor,
            eps=EPS,
            record_id=1,
            **shape,
        )
    lab.run()
    assert state.value[:2].tolist() == [1, 1]
