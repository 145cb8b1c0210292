"""The feed-forward gate against the reference, also where an exponential would overflow."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import FRESH, gate
from lorawgpu.ops.gate import gate_forward


@pytest.mark.parametrize("gain", [4, 30, 1e4])  # exp(88) is the largest of float32
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_matches_reference(plan, act, gain):
    check(plan, gate, (act, 3, 123), (act, 1, 1), (act, 2, 6912), (act, 5, 16), gain=gain)


def test_an_unknown_activation_is_refused(plan):
    lab = Lab(plan)
    m, state = lab.rows(2, 10), lab.output(16, initial=FRESH, dtype="u32")
    with lab.section, pytest.raises(ValueError, match="activation 'gelu', want one of relu2, silu"):
        gate_forward(plan, m.tensor, lab.input(normal(2, 32)), state.tensor, rows=2, width=10, act="gelu", record_id=0)


@pytest.mark.parametrize("column", [4, 16 + 5], ids=["gate", "up"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_input_is_seen(plan, column, value):
    """relu2 of NaN is 0 on a GPU, so without the check training would continue."""
    lab = Lab(plan)
    gu = normal(2, 32)
    gu[1, column] = value
    m, state = lab.rows(2, 10), lab.output(16, initial=FRESH, dtype="u32")
    with lab.section:
        gate_forward(plan, m.tensor, lab.input(gu), state.tensor, rows=2, width=10, act="relu2", record_id=7)
    lab.run()
    assert state.value[:2].tolist() == [1, 7]
