"""Flat micro-batches: the arrays, the order, packing, and an exact resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorawgpu.data.batch_order import Batches, BatchSettings, DataPosition, pack
from lorawgpu.data.batching import ALIGN, Sample, bucket, flatten, sequential, token_capacity
from lorawgpu.data.source_lines import describe_lines
from lorawgpu.errors import UserError


def sample(ids, labels=None):
    return Sample(np.array(ids, np.int32), np.array(ids if labels is None else labels, np.int32))


class ListSource:
    """Samples whose tokens are their own indices in the corpus, so that a missing token is noticed."""

    def __init__(self, lengths, start=1):
        self.lengths = np.array(lengths, np.int64)
        self.begin = start + np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return sample(np.arange(self.begin[index], self.begin[index + 1]))


def batches(lengths, *, packing=True, capacity=128, accumulation=2, size=2, seed=0, weights=None, sources=None):
    sources = [ListSource(lengths)] if sources is None else sources
    return Batches(sources, BatchSettings(seed, size, accumulation, capacity, packing), weights)


def one_epoch(stream):
    out = []
    for step in stream:
        out.append(step)
        if step.ends_epoch:
            return out


def tokens_of(steps):
    return np.concatenate([b.ids[: b.tokens] for s in steps for b in s.micro_batches])


def test_flatten_writes_the_step_data_by_hand():
    batch = flatten([sample([5, 6, 7], [5, -100, 7]), sample([8]), sample([9, 10])], 8)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert batch.position.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert batch.slot.tolist() == list(range(8))
    assert batch.kv_start.tolist() == [0, 0, 0, 3, 4, 4, 6, 7]
    assert batch.segment_end.tolist() == [3, 3, 3, 4, 6, 6, 7, 8]
    assert batch.target_rows.tolist() == [1, 4]  # 5 and 9 are first tokens, 8 is a whole sequence, labels[1] is masked
    assert batch.target_ids.tolist() == [7, 10]
    assert (batch.tokens, batch.samples, batch.targets, batch.capacity) == (6, 3, 2, 8)
    assert all(a.dtype == np.int32 for a in (batch.ids, batch.position, batch.slot, batch.kv_start, batch.segment_end))
    assert batch.target_rows.dtype == batch.target_ids.dtype == np.int32


def test_the_first_label_of_a_sequence_is_not_a_target_of_the_previous_one():
    batch = flatten([sample([1, 2]), sample([3, 4])], 4)
    assert dict(zip(batch.target_rows.tolist(), batch.target_ids.tolist(), strict=True)) == {0: 2, 2: 4}


def test_labels_that_differ_from_the_ids_are_kept():
    assert flatten([sample([1, 2, 3], [-100, 9, -100])], 4).target_ids.tolist() == [9]


def test_flatten_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="5 tokens do not fit into a capacity of 4"):
        flatten([sample([1] * 5)], 4)


def test_buckets_are_few_and_tight():
    assert [bucket(n) for n in (1, 16, 17, 33, 65, 129, 512, 513, 1025, 2048, 2049)] == [
        16, 16, 32, 64, 128, 256, 512, 640, 1280, 2048, 2560,
    ]  # fmt: skip
    sizes = {bucket(n) for n in range(1, 8193)}
    assert len(sizes) <= 24
    assert all(s % ALIGN == 0 for s in sizes if s > 64)
    assert all(n <= bucket(n) <= max(1.25 * n, n + ALIGN) for n in range(65, 8193))
    assert bucket(1300, limit=1408) == 1408


def test_token_capacity_is_what_kernels_work_in():
    assert token_capacity(4, 512) == 2048
    assert token_capacity(1, 1300) == 1408
    assert token_capacity(1, 20) == 32


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(64, 200))
def test_packing_neither_loses_nor_repeats_samples(lengths, capacity):
    bins = pack(np.array(lengths, np.int64), capacity)
    assert sorted(i for members in bins for i in members.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in bins)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_an_epoch_holds_every_token_once(lengths, packing, accumulation, size, seed):
    data = batches(lengths, packing=packing, accumulation=accumulation, size=size, seed=seed, capacity=192)
    stream = data.step_batches()
    for epoch in (0, 1):
        steps = one_epoch(stream)
        assert sorted(tokens_of(steps).tolist()) == list(range(1, 1 + sum(lengths)))
        assert len(steps) == data.steps(epoch)
        assert all(len(s.micro_batches) == accumulation for s in steps[:-1])
        assert steps[-1].position == DataPosition(epoch + 1, mixing=((epoch + 1) * len(lengths),))


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=60),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 40),
    st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(deadline=None)
def test_resume_at_any_step_continues_with_the_same_bytes(lengths, packing, accumulation, steps, weight):
    sources = [ListSource(lengths), ListSource([7, 3, 5], start=10_000)]

    def fresh():
        data = batches(None, sources=sources, packing=packing, accumulation=accumulation, weights=[weight, 1.0])
        return data

    stream = fresh().step_batches()
    position = None
    for _ in range(steps):
        position = next(stream).position
    if position is not None:
        position = DataPosition.from_dict(json.loads(json.dumps(position.to_dict())))
    resumed = fresh().step_batches(position)
    for _ in range(12):
        expected, got = next(stream), next(resumed)
        assert expected.position == got.position and expected.ends_epoch == got.ends_epoch
        for a, b in zip(expected.micro_batches, got.micro_batches, strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.target_rows, b.target_rows)


def test_resume_inside_a_packing_buffer_of_many():
    lengths = np.random.default_rng(0).integers(1, 64, 3000)  # several packing buffers of 128 x 128 tokens
    data = batches(lengths, capacity=128, accumulation=3)
    steps = one_epoch(data.step_batches())
    assert len({s.position.packing_start for s in steps}) > 3
    middle = next(i for i, s in enumerate(steps) if s.position.packing_start > 0 and s.position.packing_batches > 0)
    rest = one_epoch(data.step_batches(steps[middle].position))
    np.testing.assert_array_equal(tokens_of(rest), tokens_of(steps[middle + 1 :]))
    assert sorted(tokens_of(steps).tolist()) == list(range(1, 1 + lengths.sum()))


def test_a_position_is_stored_under_the_keys_of_every_checkpoint():
    position = DataPosition(epoch=1, consumed=7, packing_start=4, packing_batches=2, mixing=(9, 3))
    stored = {"epoch": 1, "consumed": 7, "window_start": 4, "window_batches": 2, "mixing": [9, 3]}
    assert position.to_dict() == stored and DataPosition.from_dict(stored) == position


def test_a_position_in_other_data_is_refused():
    position = next(batches([5] * 200).step_batches()).position
    with pytest.raises(UserError, match="does not match these data sets"):
        next(batches([50] * 200).step_batches(position))


def test_the_order_depends_on_seed_and_epoch_alone():
    data = batches([3] * 50)
    assert not np.array_equal(data.order(0), data.order(1))
    assert not np.array_equal(data.order(0), batches([3] * 50, seed=1).order(0))
    np.testing.assert_array_equal(data.order(1), batches([3] * 50, packing=False, size=7).order(1))


def test_without_packing_a_micro_batch_has_micro_batch_size_samples():
    steps = one_epoch(batches([9] * 7, packing=False, size=3, accumulation=2, capacity=128).step_batches())
    assert [[b.samples for b in s.micro_batches] for s in steps] == [[3, 3], [1]]


def test_weights_say_how_often_an_epoch_sees_a_sample():
    sources = [ListSource([2] * 10), ListSource([2] * 10, start=1000), ListSource([2] * 10, start=2000)]
    data = batches(None, sources=sources, weights=[1.0, 2.0, 0.5])
    first, second = data.order(0), data.order(1)
    assert np.bincount(first, minlength=30).tolist()[:20] == [1] * 10 + [2] * 10
    halves = [o[o >= 20] for o in (first, second)]
    assert sorted(np.concatenate(halves).tolist()) == list(range(20, 30))  # both halves, none twice


def test_a_weight_of_zero_is_rejected():
    with pytest.raises(UserError, match="wanted 0.001 to 1000"):
        batches([1], weights=[0.0])


def test_no_samples_is_an_error():
    with pytest.raises(UserError, match="no sample"):
        next(batches([]).step_batches())


@pytest.mark.parametrize(("median", "sigma"), [(60, 0.5), (200, 0.8), (400, 1.0), (900, 0.6)])
def test_packing_efficiency_on_long_tailed_lengths(median, sigma):
    """The lengths of chat data are log-normal; packing must fill 97% for each of these distributions."""
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(median), sigma, 8000), 1, 2048).astype(int)
    data = batches(lengths, capacity=2048, accumulation=1)
    steps = one_epoch(data.step_batches())
    used = sum(s.tokens for s in steps)
    rows = sum(b.capacity for s in steps for b in s.micro_batches)
    assert used == lengths.sum()
    assert used / rows > 0.97


def test_describe_lines():
    assert describe_lines([("b.jsonl", 4), ("a.jsonl", 10), ("a.jsonl", 9), ("a.jsonl", 10)]) == (
        "a.jsonl, lines 9, 10; b.jsonl, line 4"
    )
    many = describe_lines([("a.jsonl", n) for n in range(1, 1000)])
    assert many.endswith("lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, and 987 more")


def test_sequential_keeps_the_order_and_fills_the_capacity():
    source = ListSource([60, 60, 10, 128, 1])
    out = list(sequential(source, 128))
    assert [b.samples for b in out] == [2, 1, 1, 1]
    assert np.concatenate([b.ids[: b.tokens] for b in out]).tolist() == list(range(1, 260))
    assert [b.capacity for b in out] == [128, 16, 128, 16]
