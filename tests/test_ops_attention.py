"""Attention kernels against the float64 reference at odd and real shapes, and the bits of a row in any batch."""

from dataclasses import replace

import numpy as np
import pytest
from oplab import Lab, assert_right, check

from lorawgpu.doctor.attention import attention, compared, expected_attention, record_attention, sequences
from lorawgpu.doctor.kernels import EXACT, ROUNDED, SUMMED
from lorawgpu.families.keys import SIZE_LIMITS
from lorawgpu.gpu import Plan
from lorawgpu.ops import attention_decode, attention_flash
from lorawgpu.ops.attention import MAX_HEAD_DIM, attention_forward

IMPLS = ["chain", "flash"]

SIZES = {
    "one token": ((1, 1, 8, 1), {}),
    "3 tokens, HD 8": ((1, 1, 8, 3), {}),
    "33, HD 6, GQA 4/1": ((4, 1, 6, 33), {"tail": 4}),
    "17 in 3, GQA 9/3": ((9, 3, 16, 5, 1, 11), {"tail": 2}),
    "70 in 2, GQA 6/2": ((6, 2, 16, 41, 29), {"tail": 3, "spare": 2}),
    "70 in 2, HD 64": ((3, 1, 64, 41, 29), {"tail": 3, "spare": 9}),
    "130 in 4, GQA 20/5, HD 16": ((20, 5, 16, 100, 1, 16, 13), {"tail": 5}),
    "130, HD 128": ((3, 1, 128, 130), {}),
    "75, HD 80": ((2, 1, 80, 70, 5), {}),
    "40, HD 256": ((1, 1, 256, 40), {}),
    "70 in 2, HD 512": ((2, 1, 512, 65, 5), {}),
    "40, HD 300": ((2, 1, 300, 40), {"spare": 1}),
    "window of a block": ((4, 2, 8, 97, 33, 1, 64), {"window": 32, "tail": 3, "spare": 2}),
    "window of two blocks behind": ((2, 1, 8, 300), {"window": 65}),
    "window of a sequence": ((2, 1, 8, 40, 41, 39), {"window": 40}),
    "window beyond all": ((2, 1, 8, 20, 9), {"window": 1000}),
    "window, HD 128": ((3, 1, 128, 150, 5), {"window": 37}),
    "soft cap": ((4, 2, 16, 41, 29), {"softcap": 1.5, "tail": 3}),
    "soft cap, HD 128": ((3, 1, 128, 70), {"softcap": 50.0}),
    "saturated": ((2, 1, 16, 40), {"softcap": 0.3, "gain": 3.0}),
    "window and soft cap": ((2, 1, 10, 50, 20), {"window": 11, "softcap": 2.0, "spare": 1}),
    "added to": ((4, 2, 10, 50, 20), {"accumulate": True, "spare": 2, "window": 11, "softcap": 2.0}),
    "HD 12": ((8, 1, 12, 33, 4), {}),
    "HD 20": ((4, 4, 20, 33, 4), {"tail": 1}),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SIZES)
def test_matches_the_reference(plan, name, impl):
    sizes, options = SIZES[name]
    check(plan, attention, (impl, *sizes), **options)


PAIRS = [
    *("3 tokens, HD 8", "17 in 3, GQA 9/3", "70 in 2, GQA 6/2", "130, HD 128", "40, HD 256", "HD 20"),
    *("130 in 4, GQA 20/5, HD 16", "window of a block", "window of a sequence", "window, HD 128"),
]


@pytest.mark.parametrize("name", PAIRS)
def test_matches_the_reference_with_room_for_pairs(plan, name):
    sizes, options = SIZES[name]
    check(plan, attention, ("flash", *sizes), room=1 << 24, **options)


@pytest.mark.parametrize("room", [0, 1 << 24])
@pytest.mark.parametrize("name", ["70 in 2, HD 64", "130, HD 128", "130 in 4, GQA 20/5, HD 16", "added to"])
def test_gradients_summed_in_one_part(plan, monkeypatch, name, room):
    """As with many rows; SIZES have so few rows that walks are split."""
    monkeypatch.setattr(attention_flash, "ENOUGH_FOR_GROUPS", 0)
    monkeypatch.setattr(attention_flash, "ENOUGH_WORKGROUPS", 0)
    sizes, options = SIZES[name]
    check(plan, attention, ("flash", *sizes), room=room, **options)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_a_sequence_may_start_at_slots_of_their_own(plan, impl):
    x = sequences(6, 2, 16, 90, 30, room=1 << 20)
    x = replace(x, kv_start=np.maximum(x.kv_start, x.slot - x.slot % 20))
    made = run(plan, impl, x)
    assert_right(compared(made, expected_attention(x)), SUMMED)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(plan, impl):
    """With scores of 1e4, a softmax without its maximum overflows. The tolerance is their rounding, 1e-3."""
    check(plan, attention, (impl, 6, 2, 16, 50, 20), gain=60.0, tolerance=5e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_two_records_in_one_submit_keep_their_own_scale(plan, impl):
    lab = Lab(plan)
    with lab.section:
        both = [attention(lab, impl, 6, 2, 16, 20, scale=scale) for scale in (0.1, 0.9)]
    lab.run()
    for results in both:
        assert_right(results(), SUMMED)


def run(plan, impl, x, backward=True):
    """The outputs by name, after a run."""
    lab = Lab(plan)
    with lab.section:
        made = record_attention(lab, impl, x, backward)
    lab.run()
    return made


def rows_of(x, slot, kv_start):
    """The first rows of x, with slots of their own in its cache."""
    return replace(x, q=x.q[: len(slot)], slot=np.array(slot), kv_start=np.array(kv_start))


@pytest.mark.parametrize("impl", IMPLS)
def test_one_query_sees_a_longer_cache_and_nothing_else(plan, impl):
    """Slots that no row sees may hold anything, because a cache is not written to its end."""
    x = rows_of(sequences(6, 2, 16, 601), [500], [90])
    wanted = expected_attention(x, backward=False)
    for values in (x.k, x.v):
        values[:90], values[501:] = np.nan, np.nan
    assert_right(compared(run(plan, impl, x, backward=False), wanted), SUMMED)


@pytest.mark.parametrize("impl", IMPLS)
def test_new_tokens_of_several_sequences_with_slots_of_their_own(plan, impl):
    x = rows_of(sequences(6, 2, 16, 300), [17, 18, 19, 100, 250, 251], [0, 0, 0, 100, 200, 200])
    made = run(plan, impl, x, backward=False)
    assert_right(compared(made, expected_attention(x, backward=False)), SUMMED)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sizes", [(4, 2, 16), (3, 1, 64), (2, 1, 10)], ids=str)
def test_a_row_that_sees_one_key_has_no_gradient_of_its_query(plan, impl, sizes):
    """With one key the weight is always 1, so dq is exactly 0: Adam would turn a rounding error into a full step."""
    x = sequences(*sizes, 2, 1, 9, tail=4)
    made, one = run(plan, impl, x), x.kv_start == x.slot
    dq = made["dq"].value[:, : x.q.shape[1]]
    assert (dq[one] == 0).all() and (dq[~one] != 0).all()
    assert_right(compared(made, expected_attention(x)), SUMMED)


@pytest.mark.parametrize("impl", IMPLS)
def test_with_a_window_of_one_key_the_output_is_its_value(plan, impl):
    x = sequences(3, 1, 8, 9, 5, tail=3, window=1)
    made = run(plan, impl, x)
    assert_right({"out": (made["out"].value, np.tile(x.v, 3))}, EXACT)
    assert not made["dq"].value.any()
    assert np.abs(made["dk"].value).max() < 1e-6  # the rounding of delta
    assert_right({"dv": (made["dv"].value, x.dout.reshape(-1, 3, 8).sum(1))}, ROUNDED)


AROUND = {  # lengths before, lengths after, tail, spare slots
    "second of three": ([37], [29], 0, 0),
    "another capacity": ([], [], 150, 40),
    "after short ones": ([1, 1, 5, 3, 1], [2, 1, 90], 3, 0),
    "at a block's end": ([64, 63], [1], 1, 1),
    "long neighbors": ([131], [140], 0, 0),
}


def bits_of(made, rows):
    return [output.value[rows].tobytes() for output in made.values()]


@pytest.mark.parametrize(
    ("sizes", "window"),
    [((6, 2, 16), None), ((3, 1, 32), None), ((3, 1, 64), None), ((3, 1, 128), None), ((2, 1, 8), 20)],
    ids=str,
)
def test_a_row_keeps_its_bits_whatever_surrounds_it(device, kernels, sizes, window):
    """Output and saved statistics depend neither on position in the batch, nor on capacity, nor on neighbors."""
    alone = sequences(*sizes, 75, window=window)
    want = bits_of(run(Plan(device, kernels), "flash", alone, backward=False), slice(None))
    for seed, (name, (before, after, tail, spare)) in enumerate(AROUND.items(), 1):
        crowd = sequences(*sizes, *before, 75, *after, tail=tail, spare=spare, seed=seed, window=window)
        rows = slice(sum(before), sum(before) + 75)
        for values in ("q", "k", "v"):
            getattr(crowd, values)[rows] = getattr(alone, values)
        assert bits_of(run(Plan(device, kernels), "flash", crowd, backward=False), rows) == want, name


def test_new_tokens_keep_their_bits_and_see_only_their_own_slots(device, kernels):
    """As in generation: each sequence owns slots, and the slots in between were never written."""
    alone, crowd = sequences(6, 2, 16, 75), sequences(6, 2, 16, 900)
    new, starts = np.arange(70, 75), np.array([301, 100, 777])
    want = bits_of(run(Plan(device, kernels), "flash", alone, backward=False), new)
    crowd.k[:], crowd.v[:] = np.nan, np.nan
    for start in starts:
        crowd.k[start : start + 75], crowd.v[start : start + 75] = alone.k, alone.v
    crowd = rows_of(crowd, (starts[:, None] + new).ravel(), starts.repeat(len(new)))
    crowd.q[:] = np.tile(alone.q[new], (3, 1))
    made = run(Plan(device, kernels), "flash", crowd, backward=False)
    for i in range(3):
        assert bits_of(made, slice(i * len(new), (i + 1) * len(new))) == want


def test_a_shape_that_does_not_fit_is_named(device, kernels):
    q, k = device.tensor((4, 96), "f32", "q"), device.tensor((4, 32), "f32", "keys")
    row, lse = device.tensor((4,), "u32", "slot"), device.tensor((4, 10), "f32", "lse of layer 3")
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": 16, "scale": 1.0, "workspace": None}
    with pytest.raises(ValueError, match=r"lse of layer 3 has shape \(4, 10\), want \(4, 12\)"):
        attention_forward(Plan(device, kernels), q, lse, q, k, k, row, row, **sizes)


def test_a_config_may_have_the_heads_that_every_kernel_has_a_tile_for_and_no_larger():
    assert {max(tiles) for tiles in attention_flash.TILES.values()} == {MAX_HEAD_DIM}
    assert attention_decode.fits(MAX_HEAD_DIM) and not attention_decode.fits(MAX_HEAD_DIM + 8)
    assert SIZE_LIMITS["head_dim"] == MAX_HEAD_DIM
