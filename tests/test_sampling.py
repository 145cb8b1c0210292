"""Sampling on the GPU against its specification, and the specification against the distribution."""

from dataclasses import replace

import numpy as np
import pytest
from oplab import check, normal

from lorawgpu.doctor.sampling import sample
from lorawgpu.errors import UserError
from lorawgpu.generate.sampling import Sampling
from lorawgpu.ops.decode_state import FIELDS, STRIDE, rows_buffer
from lorawgpu.ops.sample import RING, SampleBuffers, pack_settings, record_sample, sections_of, seen_bits
from lorawgpu.ops.step_state import state_buffer
from lorawgpu.reference import sample as reference

POSITION = 5


class Bench:
    """Rows of logits on the device, and plans that sample from them."""

    def __init__(self, plan, logits):
        self.device, self.plan, self.count = plan.device, plan, len(logits)
        vocab = logits.shape[1]
        self.buffers = SampleBuffers.create(self.device, self.count, vocab)
        self.logits, self.rows = self.device.upload(logits, label="logits"), rows_buffer(self.device)
        self.state = state_buffer(self.device)
        self.seen = np.stack([seen_bits((), vocab)] * self.count)
        record_sample(plan, self.buffers, self.logits, self.rows, self.state, count=self.count)

    def run(self, sampling=Sampling(), end=100, times=1):  # noqa: B008 (frozen)
        """The chosen tokens, [count, times], and the rows' state afterwards. `sampling`: one, or one for each row."""
        samplings = sampling if isinstance(sampling, list) else [sampling] * self.count
        rows = np.zeros((len(FIELDS), STRIDE), np.int32)
        rows[FIELDS.index("position")] = rows[FIELDS.index("slot")] = POSITION
        rows[FIELDS.index("end")] = end
        rows[FIELDS.index("stream")] = np.arange(STRIDE)
        self.device.write(self.rows, rows)
        self.device.write(self.buffers.seen, self.seen)
        self.device.write(self.buffers.settings, pack_settings(samplings))
        for _ in range(times):
            self.plan.run(*sections_of(samplings))
        state = dict(zip(FIELDS, self.device.read(self.rows)[:, : self.count], strict=True))
        return self.device.read(self.buffers.history)[:, :times], state


def test_greedy_takes_the_first_best_and_moves_on(plan):
    logits = normal(2, 5000)
    logits[0, 4321] = logits[0, 321] = 9
    logits[1, 17] = 9
    tokens, state = Bench(plan, logits).run()
    assert tokens.ravel().tolist() == [321, 17]
    assert state["ids"].tolist() == [321, 17] and state["position"].tolist() == [POSITION + 1] * 2
    assert state["slot"].tolist() == [POSITION + 1] * 2 and state["count"].tolist() == [1, 1]


def test_the_last_slot_is_not_left(plan):
    bench = Bench(plan, normal(1, 50))
    _, state = bench.run(end=POSITION + 2, times=3)
    assert state["slot"] == POSITION + 1 and state["position"] == POSITION + 1 and state["count"] == 3


def test_a_chosen_token_is_seen_from_then_on(plan):
    logits = np.zeros((1, 70), np.float32)
    logits[0, [65, 3, 40]] = 8, 6, 5
    tokens, _ = Bench(plan, logits).run(Sampling(repetition_penalty=2.0), times=4)
    assert tokens.tolist() == [[65, 3, 40, 65]]  # 8 and 6 fall to 4 and 3, 5 to 2.5


@pytest.mark.parametrize("bad", ["logits", "state"])
def test_non_finite_values_give_no_token(plan, bad):
    bench = Bench(plan, np.full((1, 40), np.nan if bad == "logits" else 1, np.float32))
    if bad == "state":
        bench.device.write(bench.state, np.ones(16, np.uint32))
    tokens, state = bench.run()
    assert tokens[0, 0] == 0xFFFFFFFF and state["position"] == POSITION


SETTINGS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.6),
    Sampling(1.0, min_p=0.2),
    Sampling(0.9, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    Sampling(2.0, top_p=1e-9),
    Sampling(1.0, top_k=1),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("vocab", [50, 3001])
def test_draws_as_specified(plan, sampling, vocab):
    check(plan, sample, *((replace(sampling, seed=seed), vocab) for seed in (0, 1, 1 << 40)))


def test_rows_with_other_settings_do_not_change_a_row(plan):
    """Greedy rows, and rows without top-k and top-p, next to rows that need every section."""
    logits, mixed = normal(len(SETTINGS) + 1, 3001), [*SETTINGS, Sampling(top_k=3, top_p=0.5)]
    bench = Bench(plan, 3 * logits)
    together, _ = bench.run(mixed, times=3)
    for row, sampling in enumerate(mixed):
        alone, _ = bench.run(sampling, times=3)
        assert alone[row].tolist() == together[row].tolist()
    assert len(set(map(tuple, together.tolist()))) > 2


def test_the_specification_filters_as_documented():
    scores = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    assert reference.kept(scores, 2, 1, 0).tolist() == [True, True, False, False, False]
    assert reference.kept(scores, 0, 0.69, 0).tolist() == [True, True, False, False, False]
    assert reference.kept(scores, 0, 0.71, 0).tolist() == [True, True, True, False, False]
    assert reference.kept(scores, 0, 1, 0.49).tolist() == [True, True, True, False, False]
    assert reference.kept(scores, 2, 0.5, 0).tolist() == [
        True,
        False,
        False,
        False,
        False,
    ]  # 0.4 of 0.7 is more than half
    assert reference.kept(np.zeros(4), 2, 1, 0).all()  # equal at the border


def test_the_specification_draws_from_the_softmax():
    scores = np.log([0.5, 0.25, 0.15, 0.1])
    draws = [reference.draw(scores, np.ones(4, bool), reference.noise(7, 0, i, 4)) for i in range(4000)]
    share = np.bincount(draws, minlength=4) / len(draws)
    np.testing.assert_allclose(share, np.exp(scores), atol=0.03)  # four standard deviations: 4 sqrt(0.25 / 4000)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_k", -1), ("top_p", 0), ("top_p", 1.1), ("min_p", 2), ("repetition_penalty", 0)],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(UserError, match=f"{field} is {value}"):
        replace(Sampling(), **{field: value}).check()


def test_history_is_a_ring(plan):
    bench = Bench(plan, normal(1, 40))
    bench.run(times=RING + 3, end=1000)
    assert (bench.device.read(bench.buffers.history) < 40).all()
