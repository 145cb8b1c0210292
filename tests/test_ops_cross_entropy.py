"""Loss and dlogits against the reference, in chunks and with unused rows; the sum over a step."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import FRESH, cross_entropy, softcap
from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum, loss_value
from lorawgpu.ops.softcap import softcap_forward

SIZES = ((7, 123, 2), (2, 1, 2), (4, 5003, 3), (3, 128256, 2))  # rows, vocabulary, rows of a chunk


def test_matches_reference(plan):
    check(plan, cross_entropy, *(("plain", *sizes) for sizes in SIZES))


def test_row_weights_multiply_loss_and_gradient(plan):
    check(plan, cross_entropy, *(("weighted", *sizes) for sizes in SIZES))


@pytest.mark.parametrize("variant", ["plain", "weighted"])
def test_soft_cap_of_the_logits(plan, variant):
    """Caps far above the logits, near them and far below; targets that are capped, too."""
    check(plan, cross_entropy, *((variant, *size, cap) for size in SIZES[:3] for cap in (300.0, 30.0, 4.0, 0.5)))
    check(plan, cross_entropy, (variant, 3, 34, 2, 30.0), scale=200.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_soft_cap_does_not_hide_a_logit_that_is_not_finite(plan, value):
    lab, logits = Lab(plan), normal(2, 32)
    logits[1, 30] = value
    state, losses, capped = lab.output(16, initial=FRESH, dtype="u32"), lab.output(2), lab.output(2, 32, initial=logits)
    inputs = lab.input(logits), lab.input(np.array([4, 4], np.int32)), state.tensor
    shape = {"rows": 2, "vocab": 32}
    with lab.section:
        cross_entropy_forward(plan, losses.exact, *inputs, start=0, record_id=8, softcap=30.0, **shape)
        softcap_forward(plan, capped.tensor, cap=30.0, **shape)
    lab.run()
    assert state.value[:2].tolist() == [1, 8]
    np.testing.assert_array_equal(np.isfinite(capped.value), np.isfinite(logits))


@pytest.mark.parametrize("entry", [cross_entropy_forward, cross_entropy_forward_backward])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_target_beyond_the_vocabulary_is_noticed(plan, entry, weighted):
    """Silently unused, it would lower the mean loss, which counts it."""
    lab, rows = Lab(plan), 4
    logits = lab.output(rows, 32, initial=normal(rows, 32))
    state, losses = lab.output(16, initial=FRESH, dtype="u32"), lab.output(rows)
    ids = lab.input(np.array([3, 32, -100, 2**31 - 1], np.int32))
    weights = lab.input(np.ones(rows, np.float32)) if weighted else None
    with lab.section:
        entry(plan, losses.exact, logits.exact, ids, state.tensor, start=0, rows=rows, vocab=32, record_id=8,
              row_weights=weights)  # fmt: skip
    lab.run()
    assert state.value[:2].tolist() == [1, 8]
    assert np.isnan(losses.value).tolist() == [False, True, False, True] and losses.value[2] == 0
    assert np.isfinite(logits.value).all()


def test_soft_cap_in_place(plan):
    check(plan, softcap, (1, 1, 30.0), (3, 123, 30.0), (2, 42, 5.0), (2, 5003, 1e4))


def test_large_logits(plan):
    check(plan, cross_entropy, ("plain", 4, 5003, 3), scale=30.0)


@pytest.mark.parametrize("offset", [-2000.0, 2000.0])
def test_logits_far_from_0(plan, offset):
    """Without the maximum, exp would under- or overflow. float32 resolves 2000 to 1.2e-4."""
    check(plan, cross_entropy, ("plain", 3, 40, 1), offset=offset, tolerance=1e-4)


def test_weights_of_rows_without_a_target_do_not_count(plan):
    """Whatever they are; a weight of a target row that is not finite makes the step bad."""
    lab, rows = Lab(plan), 5
    states, losses = [lab.output(16, initial=FRESH, dtype="u32") for _ in range(2)], lab.output(rows)
    ids = np.array([0, 122, -1, 7, -100], np.int32)
    weights = np.array([[0.5, -2.0, np.nan, 0.0, np.inf], [1, 1, 1, np.inf, 1]], np.float32)
    shape = {"start": 0, "rows": rows, "vocab": 123, "record_id": 6}
    with lab.section:
        for state, w in zip(states, weights, strict=True):
            inputs = lab.padded(normal(rows, 123)), lab.input(ids), state.tensor
            cross_entropy_forward(plan, losses.exact, *inputs, row_weights=lab.input(w), **shape)
    lab.run()
    assert states[0].value.tolist() == FRESH and states[1].value[:2].tolist() == [1, 6]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_loss_marks_the_step(plan, value):
    lab = Lab(plan)
    state, losses = lab.output(16, initial=FRESH, dtype="u32"), lab.output(2)
    logits = normal(2, 32)
    logits[1, 30] = value
    shape = {"start": 0, "rows": 2, "vocab": 32}
    with lab.section:
        for record_id, ids in ((3, [4, -1]), (8, [4, 4])):  # the bad row is unused, then used
            inputs = lab.input(logits), lab.input(np.array(ids, np.int32)), state.tensor
            cross_entropy_forward(plan, losses.exact, *inputs, record_id=record_id, **shape)
    lab.run()
    assert state.value[:2].tolist() == [1, 8]


def test_loss_sum_is_exact(plan):
    """The total is the float64 sum to 2^-32 per loss, even from 2^24 on, where float32 has only even numbers."""
    lab = Lab(plan)
    losses = np.abs(normal(20001)) * 10
    losses[:4] = [-3e-8, 1e6, 0, np.nan]  # rounding can make a loss negative; a non-finite one is the state's business
    total = lab.output(2, initial=[1 << 24, 0], dtype="u32")
    glosses = lab.input(losses)
    with lab.section:
        loss_sum(plan, total.exact, glosses, start=0, rows=7)
        loss_sum(plan, total.exact, glosses, start=7, rows=30000)  # past the end: ignored
    lab.run()
    want = 2.0**24 + np.nansum(losses.astype(np.float64))
    assert abs(loss_value(total.value) - want) < len(losses) * 2.0**-32
    assert loss_value(np.array([0xFFFFFFFF, 1 << 31], np.uint32)) == -0.5
