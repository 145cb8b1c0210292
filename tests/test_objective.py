"""Objectives: row weights, the adapter off, and an objective in two passes, defined in this file."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tiny_model import Tiny, gradients, random_samples, tiny_config

from lorawgpu.backward.head import head_backward
from lorawgpu.backward.loss import chunk_losses
from lorawgpu.data.batching import flatten
from lorawgpu.engine.objective import CausalLM
from lorawgpu.model import head as model_head
from lorawgpu.model.head import head_forward
from lorawgpu.ops.cross_entropy import loss_sum, loss_value
from lorawgpu.reference.cross_entropy import cross_entropy_forward
from lorawgpu.reference.gather import gather_forward
from lorawgpu.reference.model import model_backward, model_forward, step_gradients
from lorawgpu.verify.compare import relative_error

NOISE = 1e-4  # float32 against float64 through two layers; a lost weight or pass is off by 1e-1 or more


@pytest.fixture(scope="module")
def tiny(device, kernels):
    return Tiny(device, kernels, tiny_config())


@pytest.fixture
def chunks_of_64(monkeypatch):
    """The head of a batch with more target rows takes several chunks."""
    monkeypatch.setattr(model_head, "LOGITS_BUDGET", 1)


def long_batch(*lengths, capacity=256):
    return flatten([replace(s, labels=s.input_ids) for s in random_samples(lengths)], capacity)


def worst(got, expected):
    return max(np.linalg.norm(got[n] - e) / np.linalg.norm(e) for n, e in expected.items())


def weighted(batch, seed=0):
    """The batch with row weights of both signs, including a zero."""
    weights = np.random.default_rng(seed).uniform(-1, 2, batch.targets).astype(np.float32)
    weights[1] = 0
    return replace(batch, row_weights=weights)


# Row weights


def test_row_weights_enter_loss_and_gradient(tiny, chunks_of_64):
    """A step of two micro-batches, the second without weights: they count as 1. The divisor counts target tokens."""
    batches = [weighted(long_batch(60, 50)), flatten(random_samples((9,)), 64)]
    engine = tiny.engine(256, 128, objective=partial(CausalLM, weighted=True))
    loss, grads = gradients(engine, batches)
    expected_loss, expected = step_gradients(tiny.reference(), batches)
    divisor = sum(map(engine.objective.divisor, batches))
    assert divisor == sum(b.targets for b in batches)
    assert loss / divisor == pytest.approx(expected_loss, rel=1e-5)
    assert worst({n: g / divisor for n, g in grads.items()}, expected) < NOISE
    engine.begin()
    for batch in batches:
        engine.evaluate(batch)
    assert engine.loss_sum() == loss


def test_weights_of_one_are_no_weights(tiny):
    batch = long_batch(30, 20, capacity=64)
    loss, grads = gradients(tiny.engine(), [batch])
    other_loss, other = gradients(tiny.engine(objective=partial(CausalLM, weighted=True)), [batch])
    assert loss == other_loss and all(np.array_equal(g, other[name]) for name, g in grads.items())


def test_a_weight_that_is_not_finite_marks_the_step(tiny):
    batch = long_batch(30, 20, capacity=64)
    bad = replace(batch, row_weights=np.full(batch.targets, np.nan, np.float32))
    engine = tiny.engine(objective=partial(CausalLM, weighted=True))
    before = engine.tensors()
    engine.step([bad], 1, 1e-3)
    state = engine.steps_state()
    assert state.bad and engine.non_finite.names[state.record] == "loss"
    assert all(np.array_equal(t, before[name]) for name, t in engine.tensors().items())
    engine.step([flatten(random_samples((9,)), 64)], 2, 1e-3)  # fewer targets: the weights beyond them do not count
    assert not engine.steps_state().bad


def test_weights_that_nobody_would_read_are_refused(tiny):
    with pytest.raises(ValueError, match="unweighted CausalLM"):
        tiny.engine().evaluate(weighted(long_batch(30, capacity=64)))


# The adapter off


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_with_the_adapter_off_the_base_model_answers(device, kernels, family):
    """As an adapter of zeros: to rounding, since a driver may fuse what no low-rank term stands between."""
    tiny = Tiny(device, kernels, tiny_config(family))
    batch = long_batch(30, 20, capacity=64)
    engine = tiny.engine(dropout=0.5)
    zeros = tiny.engine(tensors={name: np.zeros_like(t) for name, t in tiny.tensors.items()})
    found = []
    for one, adapter in ((engine, False), (zeros, True), (engine, True)):
        one.begin()
        one.evaluate(batch, adapter=adapter)
        found.append((one.loss_sum(), one.logits(batch, np.arange(20), adapter=adapter)))
    (base_loss, base), (zero_loss, zero), (loss, logits) = found
    flips = 5e-2 if family == "bitnet" else 0.0  # a rounding of BitNet's quantizer that another last bit flips
    assert base_loss == pytest.approx(zero_loss, rel=max(1e-6, flips))
    assert relative_error(base, zero) < max(1e-5, flips) < relative_error(base, logits)
    assert all(np.array_equal(t, tiny.tensors[name]) for name, t in engine.tensors().items())


# An objective in two passes


SEQUENCE_WEIGHTS = """
// S = sum of (losses - base) over the target rows of a sequence; weights = S in each of these rows, values = S^2 / 2 in
// the first of them. sequence: its number by target row, 0 past the last. Grid: one thread, for a test has few rows.
@group(0) @binding(0) var<storage, read> sequence: array<u32>;
@group(0) @binding(1) var<storage, read> losses: array<f32>;
@group(0) @binding(2) var<storage, read> base: array<f32>;
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;
@group(0) @binding(4) var<storage, read_write> values: array<f32>;

@compute @workgroup_size(1)
fn main() {
    let count = arrayLength(&sequence);
    for (var i = 0u; i < count; i++) {
        var sum = 0.0;
        var first = true;
        for (var j = 0u; j < count; j++) {
            if (sequence[j] == sequence[i]) {
                sum += losses[j] - base[j];
                first = first && j >= i;
            }
        }
        weights[i] = select(sum, 0.0, sequence[i] == 0u);
        values[i] = select(0.0, sum * sum / 2.0, first && sequence[i] != 0u);
    }
}
"""


class SquaredRatio:
    """The sum over sequences of S^2 / 2, S being the log-likelihood ratio of base and adapted model.

    As in preference objectives, a row's weight depends on all rows of its sequence and on the base model: the first
    pass takes the losses of all chunks, a kernel makes weights of them, the second goes back through the same chunks.
    The divisor is the number of sequences.
    """

    sums = ("loss", "nll")
    base_first = True

    def __init__(self, device, targets, kernel):
        self.device, self.kernel = device, kernel
        self.base, self.losses, self.weights, self.values = (
            device.tensor((targets,), label=label) for label in ("base", "losses", "weights", "values")
        )
        self.sequence = device.tensor((targets,), "u32", "sequence")

    def write(self, batch):
        numbers = np.zeros(self.sequence.size, np.uint32)
        numbers[: batch.targets] = 1 + batch.kv_start[batch.target_rows]
        self.device.write(self.sequence, numbers)

    def record(self, c, head, x, dx, totals):
        losses = self.base if totals is None else self.losses

        def likelihood(start, rows):
            head_forward(c, head, x, start, rows)
            chunk_losses(c, head, losses, start, rows, gradient=False)
            if totals:
                loss_sum(c.plan, totals["nll"], losses, start=start, rows=rows)

        def gradient(start, rows):
            head_forward(c, head, x, start, rows)
            chunk_losses(c, head, head.losses, start, rows, gradient=True, row_weights=self.weights)
            head_backward(c, head, dx, start, rows)

        head.record(c, likelihood, "likelihood")
        with c.plan.section("weigh"):
            if totals:
                tensors = {name: getattr(self, name) for name in ("sequence", "losses", "base", "weights", "values")}
                c.plan.record(self.kernel, "main", (1,), **tensors)
                loss_sum(c.plan, totals["loss"], self.values, start=0, rows=self.values.size)
        if dx is None:
            return lambda targets: [*head.sections(targets, "likelihood"), "weigh"]
        head.record(c, gradient, "gradient")
        return lambda targets: [*head.sections(targets, "likelihood"), "weigh", *head.sections(targets, "gradient")]

    def divisor(self, batch):
        return batch.samples

    def metrics(self, sums, divisor):
        return {"loss": sums["loss"] / divisor, "nll": sums["nll"]}


def reference(tiny, batches):
    """-> loss and gradients over the number of sequences, and the log-likelihood's negative sum."""
    model = tiny.reference()
    base = replace(model, adapter={}, scale={})
    grads = {name: np.zeros(p.shape) for name, p in model.adapter.items()}
    loss = nll = 0.0
    for batch in batches:
        logits, saved = model_forward(model, batch)
        rows, of_base = (
            cross_entropy_forward(gather_forward(x, batch.target_rows), batch.target_ids)[0]
            for x in (logits, model_forward(base, batch)[0])
        )
        owner = batch.kv_start[batch.target_rows]
        sums = {o: (rows - of_base)[owner == o].sum() for o in set(owner.tolist())}
        loss, nll = loss + sum(s * s / 2 for s in sums.values()), nll + rows.sum()
        model_backward(model, batch, logits, saved, grads, np.array([sums[o] for o in owner.tolist()]))
    count = sum(b.samples for b in batches)
    return loss / count, {name: g / count for name, g in grads.items()}, nll


def test_an_objective_in_two_passes_that_compares_with_the_base(tiny, chunks_of_64, tmp_path):
    (tmp_path / "sequence_weights.wgsl").write_text(SEQUENCE_WEIGHTS)
    objective = partial(SquaredRatio, kernel=str(tmp_path / "sequence_weights"))
    engine = tiny.engine(256, 128, objective=objective)
    batches = [long_batch(70, 50, 30), long_batch(20, 25, capacity=64)]
    assert batches[0].targets > 128  # three chunks
    expected_loss, expected, nll = reference(tiny, batches)
    engine.begin()
    for index, batch in enumerate(batches):
        engine.accumulate(batch, 1, index)
    sums = {name: loss_value(engine.device.read(total)) for name, total in engine.totals.items()}
    metrics = engine.objective.metrics(sums, 5)
    assert metrics == pytest.approx({"loss": expected_loss, "nll": nll}, rel=1e-4)
    assert worst({n: g / 5 for n, g in engine.tensors("grads").items()}, expected) < NOISE
    assert engine.step(batches, 1, 1e-3) == 5  # the objective's divisor
    norm = np.sqrt(sum((g**2).sum() for g in expected.values()))
    assert engine.grad_norm() == pytest.approx(norm, rel=1e-4)
