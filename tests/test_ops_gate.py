"""The feed-forward gate against the reference, also where an exponential would overflow."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.ops.gate import gate_backward, gate_forward
from lorawgpu.reference import activation as reference

RTOL, ATOL = 2e-6, 1e-6  # an exp and a division of float32; g * (1 - s) cancels to absolute 1e-7


def record(lab, state, rows, width, act):
    g, u, dm = normal(rows, width) * 4, normal(rows, width, seed=1), normal(rows, width, seed=2)
    g.flat[:6] = [0, -0.0, 88, -88, 1e4, -1e4][: g.size]
    gu = lab.input(np.concatenate([pad(g), pad(u)], axis=1))
    m, dgu = lab.rows(rows, width), lab.output(rows, gu.shape[1])
    shape = {"rows": rows, "width": width, "act": act}
    gate_forward(lab.plan, m.tensor, gu, state.tensor, record_id=0, **shape)
    gate_backward(lab.plan, dgu.tensor, lab.padded(dm), gu, **shape)

    def check():
        g64, u64, dm64 = (a.astype(np.float64) for a in (g, u, dm))
        dg, du = reference.gate_backward(dm64, g64, u64, act)
        half = dgu.value.shape[1] // 2
        assert_close(m.value, reference.gate_forward(g64, u64, act), RTOL, ATOL)
        assert_close(dgu.value[:, :half], dg, RTOL, ATOL)
        assert_close(dgu.value[:, half:], du, RTOL, ATOL)

    return check


@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_matches_reference(plan, act):
    lab = Lab(plan)
    state = lab.state()
    with lab.section:
        checks = [record(lab, state, *shape, act) for shape in ((3, 123), (1, 1), (2, 6912), (5, 16))]
    lab.run()
    for check in checks:
        check()
    assert not state.value.any()


@pytest.mark.parametrize("column", [4, 16 + 5], ids=["gate", "up"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_input_is_seen(plan, column, value):
    """relu2 of NaN is 0 on a GPU: without the check it would train on."""
    lab = Lab(plan)
    gu = normal(2, 32)
    gu[1, column] = value
    state = lab.output(16, initial=[0, 0xFFFFFFFF] + 14 * [0], dtype="u32")
    with lab.section:
        gate_forward(
            plan, lab.rows(2, 10).tensor, lab.input(gu), state.tensor, rows=2, width=10, act="relu2", record_id=7
        )
    lab.run()
    assert state.value[:2].tolist() == [1, 7]
