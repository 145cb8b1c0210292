"""Loss and dlogits against the reference, in chunks and with unused rows; the sum over a step."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, loss_sum, loss_value
from lorawgpu.reference import cross_entropy as reference

FRESH = [0, 0xFFFFFFFF] + 14 * [0]


def case(lab, state, vocab, ids, chunk, scale=5.0, offset=0.0):
    """`ids` in chunks, with and without gradient; returns the check."""
    ids = np.asarray(ids, np.int32)
    chunks = -(-len(ids) // chunk)
    logits = normal(chunks * chunk, vocab) * np.float32(scale) + np.float32(offset)
    junk = pad(logits)
    junk[:, vocab:] = 50  # what stands in the padding must not count
    gids = lab.input(ids)
    losses, plain = lab.output(len(ids)), lab.output(len(ids))
    grads, kept = [], []
    for i in range(chunks):
        at = slice(i * chunk, (i + 1) * chunk)
        shape = {"start": i * chunk, "rows": chunk, "vocab": vocab, "record_id": i}
        grads.append(lab.output(*junk[at].shape, initial=junk[at]))
        kept.append(lab.output(*junk[at].shape, initial=junk[at]))
        exact = [t.whole.view(64, t.shape) for t in (losses, plain)]  # without spare rows: their length counts
        cross_entropy_forward_backward(lab.plan, exact[0], grads[-1].tensor, gids, state.tensor, **shape)
        cross_entropy_forward(lab.plan, exact[1], kept[-1].tensor, gids, state.tensor, **shape)

    def check():
        used = ids >= 0
        x = logits[: len(ids)][used].astype(np.float64)
        loss, lse = reference.cross_entropy_forward(x, ids[used])
        want_loss, want = np.zeros(len(ids)), np.zeros((len(logits), vocab))
        want_loss[used] = loss
        want[: len(ids)][used] = reference.cross_entropy_backward(x, ids[used], lse)
        # float32 has 6e-8 of the largest logit, and exp's error grows with its argument
        rtol, atol = 1e-5, 1e-6 + 1e-7 * (abs(offset) + 5 * scale)
        np.testing.assert_allclose(losses.value, want_loss, rtol=rtol, atol=atol)
        assert_close(np.concatenate([g.value for g in grads]), want, rtol, atol)
        assert np.array_equal(plain.value, losses.value)
        assert np.array_equal(np.concatenate([k.value for k in kept]), junk)

    return check


def test_matches_reference(plan):
    lab = Lab(plan)
    state = lab.output(16, initial=FRESH, dtype="u32")
    with lab.section:
        checks = [
            case(lab, state, 123, [0, 122, 7, -1, -100], 2),
            case(lab, state, 1, [0, -1], 2),
            case(lab, state, 5003, [5002, 0, 17], 3, scale=30.0),
            case(lab, state, 128256, [128255, 64], 2),
            case(lab, state, 40, [3, 9], 1, offset=-2000.0),  # far from 0: exp would underflow without the max
            case(lab, state, 40, [3, 9], 1, offset=2000.0),
        ]
    lab.run()
    for check in checks:
        check()
    assert state.value.tolist() == FRESH


def test_row_weights_multiply_loss_and_gradient(plan):
    """Rows without a target stay 0 whatever their weight is; a good row whose weight is not finite is bad."""
    lab, vocab, rows = Lab(plan), 123, 5
    states = [lab.output(16, initial=FRESH, dtype="u32") for _ in range(2)]
    logits, ids = normal(rows, vocab), np.array([0, 122, -1, 7, -100], np.int32)
    weights = np.array([0.5, -2.0, np.nan, 0.0, np.inf], np.float32)
    losses, plain, dlogits = lab.output(rows), lab.output(rows), lab.rows(rows, vocab, pad(logits))
    gids = lab.input(ids)
    shape = {"start": 0, "rows": rows, "vocab": vocab, "record_id": 6}
    with lab.section:
        inputs = gids, states[0].tensor
        given = lab.input(weights)
        cross_entropy_forward(plan, plain.exact, lab.padded(logits), *inputs, row_weights=given, **shape)
        cross_entropy_forward_backward(plan, losses.exact, dlogits.tensor, *inputs, row_weights=given, **shape)
        unused = lab.output(rows), lab.padded(logits), gids, states[1].tensor
        bad = lab.input(np.where(np.arange(rows) == 3, np.inf, 1).astype(np.float32))
        cross_entropy_forward(plan, unused[0].exact, *unused[1:], row_weights=bad, **shape)
    lab.run()
    used = ids >= 0
    want_loss, want = np.zeros(rows), np.zeros((rows, vocab))
    x = logits[used].astype(np.float64)
    want_loss[used], lse = reference.cross_entropy_forward(x, ids[used], weights[used])
    want[used] = reference.cross_entropy_backward(x, ids[used], lse, weights[used])
    np.testing.assert_allclose(losses.value, want_loss, rtol=1e-5, atol=1e-6)
    assert_close(dlogits.value, want, 1e-5, 1e-6)
    assert np.array_equal(plain.value, losses.value)
    assert states[0].value.tolist() == FRESH and states[1].value[:2].tolist() == [1, 6]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_loss_marks_the_step(plan, value):
    lab = Lab(plan)
    state = lab.output(16, initial=FRESH, dtype="u32")
    logits = normal(2, 32)
    logits[1, 30] = value
    shape = {"start": 0, "rows": 2, "vocab": 32}
    with lab.section:
        for record_id, ids in ((3, [4, -1]), (8, [4, 4])):  # the bad row is unused, then used
            cross_entropy_forward(
                plan,
                lab.output(2).tensor.view(0, (2,)),
                lab.input(logits),
                lab.input(np.array(ids, np.int32)),
                state.tensor,
                record_id=record_id,
                **shape,
            )
    lab.run()
    assert state.value[:2].tolist() == [1, 8]


def test_loss_sum_is_exact(plan):
    """The total is the float64 sum to 2^-32 a loss, though it starts at 2^24 where float32 knows even numbers only."""
    lab = Lab(plan)
    losses = np.abs(normal(20001)) * 10
    losses[:4] = [-3e-8, 1e6, 0, np.nan]  # rounding can make a loss negative; a non-finite one is the state's business
    total = lab.output(2, initial=[1 << 24, 0], dtype="u32")
    glosses = lab.input(losses)
    with lab.section:
        loss_sum(plan, total.tensor.view(0, (2,)), glosses, start=0, rows=7)
        loss_sum(plan, total.tensor.view(0, (2,)), glosses, start=7, rows=30000)  # past the end: ignored
    lab.run()
    want = 2.0**24 + np.nansum(losses.astype(np.float64))
    assert abs(loss_value(total.value) - want) < len(losses) * 2.0**-32
    assert loss_value(np.array([0xFFFFFFFF, 1 << 31], np.uint32)) == -0.5
