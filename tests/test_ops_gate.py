"""The feed-forward gate against the reference, also where an exponential would overflow."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import FRESH, gate, gate_inputs
from lorawgpu.ops.gate import ACTIVATIONS, gate_backward, gate_forward
from lorawgpu.reference.gate import activation


@pytest.mark.parametrize("gain", [4, 30, 1e4])  # exp(88) is the largest of float32
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_matches_reference(plan, act, gain):
    check(plan, gate, (act, 3, 123), (act, 1, 1), (act, 2, 6912), (act, 5, 16), gain=gain)


@pytest.mark.parametrize("layout", ["packed", "separate"])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_layouts(plan, layout, scale):
    """Packed widths: u begins at a multiple of 16, of 4, and of neither."""
    sizes = ((3, 48), (2, 84), (5, 42), (4, 7), (1, 1), (2, 130))
    check(plan, gate, *(("gelu_tanh", *size, layout, scale) for size in sizes))


def test_scale_in_the_stacked_layout(plan):
    check(plan, gate, ("silu", 3, 42, "stacked", 0.22), ("relu2", 2, 60, "stacked", -3.0))


def test_gelu_is_exact_where_it_vanishes_and_saturates(plan):
    """Relative to each value, so that 1 + tanh may not cancel; no overflow of g^3, and no 0 * infinity in the slope."""
    g = np.array([[-3e38, -1e13, -30, -12.5, -6, -3, -1.5, -1e-3, -1e-30, 1e-30, 1e-3, 1, 4.2, 8, 12.5, 3e38]], "f4")
    lab, ones = Lab(plan), np.ones_like(g)
    m, dg, state = lab.rows(*g.shape), lab.rows(*g.shape), lab.output(16, initial=FRESH, dtype="u32")
    inputs = lab.padded(g), {"rows": 1, "width": g.size, "act": "gelu_tanh", "up": lab.padded(ones)}
    with lab.section:
        gate_forward(plan, m.tensor, inputs[0], state.tensor, record_id=0, **inputs[1])
        gate_backward(plan, dg.tensor, lab.padded(ones), inputs[0], **inputs[1])
    lab.run()
    with np.errstate(over="ignore", invalid="ignore"):
        value, slope = activation(np.clip(g.astype(np.float64), -40, 40), "gelu_tanh")
    value[g > 40] = g[g > 40]
    # 2e-6: the exponent of exp is about 10 where the value is 1e-5, and float32 rounds it to 6e-7
    np.testing.assert_allclose(m.value[:, : g.size], value, rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(dg.value[:, : g.size], slope, rtol=2e-6, atol=1e-10)
    assert state.value.tolist() == FRESH


def test_columns_that_do_not_hold_both_parts_are_refused(plan):
    lab = Lab(plan)
    m, state = lab.rows(2, 10), lab.output(16, initial=FRESH, dtype="u32")
    for up_off in (9, 23):
        with lab.section, pytest.raises(ValueError, match=f"32 columns do not hold g and, from column {up_off} on, u"):
            shape = {"rows": 2, "width": 10, "act": "silu", "record_id": 0, "up_off": up_off}
            gate_forward(plan, m.tensor, lab.input(normal(2, 32)), state.tensor, **shape)


def test_an_unknown_activation_is_refused(plan):
    lab = Lab(plan)
    m, state = lab.rows(2, 10), lab.output(16, initial=FRESH, dtype="u32")
    with lab.section, pytest.raises(ValueError, match="activation 'gelu', want one of relu2, silu, gelu_tanh"):
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


@pytest.mark.parametrize("place", ["g", "u", "packed"])
def test_non_finite_input_is_seen_in_every_layout(plan, place):
    lab, g, u = Lab(plan), normal(2, 10), normal(2, 10, seed=1)
    (u if place == "u" else g)[1, 9] = np.nan
    gu, options = gate_inputs(lab, g, u, "packed" if place == "packed" else "separate")
    m, state = lab.rows(2, 10), lab.output(16, initial=FRESH, dtype="u32")
    with lab.section:
        gate_forward(plan, m.tensor, gu, state.tensor, rows=2, width=10, act="relu2", record_id=7, **options)
    lab.run()
    assert state.value[:2].tolist() == [1, 7]
