"""What the engine guarantees besides gradients: no allocation in a step, identical bits, skipped work, bad steps."""

from dataclasses import replace

import numpy as np
import pytest
import wgpu
from gradcheck import relative_error
from tiny_model import ALL, Tiny, gradients, random_samples, tiny_config

from lorawgpu.data.batching import flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.lora.peft_config import LoraConfig


@pytest.fixture(scope="module", params=["llama", "bitnet"])
def tiny(request, device, kernels):
    return Tiny(device, kernels, tiny_config(request.param, count=3))


@pytest.fixture(scope="module")
def dense(device, kernels):
    return Tiny(device, kernels, tiny_config(count=3))


def step_batches(capacity=64):
    """Two micro-batches of one optimizer step."""
    a, b, c = random_samples((9, 14, 20))
    return [flatten([a, b], capacity), flatten([c], capacity)]


def state_of(engine):
    return {which: engine.tensors(which) for which in ("params", "grads", "m", "v")}


def same_bytes(a, b):
    return all(np.array_equal(a[which][name], b[which][name]) for which in a for name in a[which])


def test_a_second_step_of_a_capacity_creates_no_gpu_object(device, tiny, monkeypatch):
    kept = ("Buffer", "BindGroup", "BindGroupLayout", "ComputePipeline", "PipelineLayout", "ShaderModule")

    def counts():
        found = wgpu.diagnostics.object_counts.get_dict()
        return {kind: found[kind]["count"] for kind in kept}

    engine = tiny.engine(dropout=0.1, checkpointing=True)
    batches = [*step_batches(64), flatten(random_samples((10,)), 16)]
    engine.step(batches, 1, 1e-3)
    before = counts()
    for kind in ("buffer", "bind_group", "bind_group_layout", "compute_pipeline", "pipeline_layout", "shader_module"):
        monkeypatch.setattr(type(device.wgpu), f"create_{kind}", None)  # so that creating even a temporary one fails
    for step in (2, 3):
        engine.step(batches, step, 1e-3)
    assert counts() == before


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2, "seed": 5}, {"checkpointing": True, "attention": "chain"}])
def test_two_engines_give_identical_bytes(tiny, options):
    engines = [tiny.engine(**options) for _ in range(2)]
    for engine in engines:
        for step in (1, 2, 3):
            engine.step(step_batches(), step, 1e-3)
    first, second = (state_of(engine) for engine in engines)
    assert same_bytes(first, second)
    assert engines[0].loss_sum() == engines[1].loss_sum()
    assert not np.array_equal(first["params"][name := next(iter(first["params"]))], tiny.tensors[name])


def test_dropout_follows_seed_step_and_micro_batch(dense):
    batch = step_batches()[1]

    def loss(seed=0, step=1, index=0):
        engine = dense.engine(dropout=0.3, seed=seed)
        engine.begin()
        engine.accumulate(batch, step, index)
        return engine.loss_sum()

    losses = [loss(), loss(seed=1), loss(step=2), loss(index=1), loss(seed=1 << 40)]
    assert len(set(losses)) == len(losses) and loss() == losses[0]


def test_evaluation_has_no_dropout_and_leaves_gradients(dense):
    batch = step_batches()[0]
    engine = dense.engine(dropout=0.3)
    plain_loss, _ = gradients(dense.engine(), [batch])
    _, before = gradients(engine, [batch])
    total = engine.loss_sum()
    engine.evaluate(batch)
    assert engine.loss_sum() - total == pytest.approx(plain_loss, abs=1e-6)  # the sum is exact up to its last bit
    assert all(np.array_equal(g, before[name]) for name, g in engine.tensors("grads").items())


def test_the_mean_gradient_moves_the_weights(dense):
    """`update` divides by the step's targets: doubling the batches changes only rounding."""
    batches = step_batches()
    engines = [dense.engine() for _ in range(2)]
    engines[0].step(batches, 1, 1e-3)
    engines[1].step(batches + batches, 1, 1e-3)
    assert engines[0].grad_norm() == pytest.approx(engines[1].grad_norm(), rel=1e-5)


def test_a_step_without_targets_does_nothing(dense):
    engine = dense.engine()
    engine.step(step_batches(), 1, 1e-3)
    before, steps = state_of(engine), engine.steps_state().steps
    mute = [replace(s, labels=np.full_like(s.labels, -100)) for s in random_samples((9, 4))]
    assert engine.step([flatten(mute, 64)], 2, 1e-3) == 0
    assert same_bytes(state_of(engine), before) and engine.steps_state().steps == steps


def test_a_mute_micro_batch_in_a_step_adds_nothing(dense):
    mute = [replace(s, labels=np.full_like(s.labels, -100)) for s in random_samples((9, 4))]
    loss, grads = gradients(dense.engine(), step_batches())
    other, with_mute = gradients(dense.engine(), [*step_batches(), flatten(mute, 64)])
    assert loss == other and all(np.array_equal(g, with_mute[name]) for name, g in grads.items())


def test_a_mute_micro_batch_counts_no_operations_and_records_no_plan(dense):
    engine = dense.engine()
    mute = flatten([replace(s, labels=np.full_like(s.labels, -100)) for s in random_samples((9, 4))], 32)
    plans = len(engine.plans())
    assert engine.flops(mute) == 0 and len(engine.plans()) == plans
    assert engine.flops(flatten(random_samples((9,)), 64)) > 0


def test_split_submits_change_no_bit(dense):
    loss, grads = gradients(dense.engine(), step_batches())
    other_loss, other = gradients(dense.engine(flops_per_submit=1e4), step_batches())
    assert loss == other_loss and all(np.array_equal(g, other[name]) for name, g in grads.items())


def test_small_plans_use_the_buffers_of_the_large(dense, device):
    engine = dense.engine(128)
    held = device.memory.held["activations"]
    for capacity in (64, 32, 16):
        gradients(engine, [flatten(random_samples((9,)), capacity)])
        engine.evaluate(flatten(random_samples((9,)), capacity))
    assert device.memory.held["activations"] == held


def test_without_an_optimizer_the_largest_plan_comes_first_too(dense, device, kernels):
    engine = Engine(device, dense.model, Options(128, 64), kernels=kernels)
    engine.evaluate(flatten(random_samples((9,)), 16))
    held = device.memory.held["activations"]
    for capacity in (64, 128, 32):
        engine.evaluate(flatten(random_samples((9,)), capacity))
    assert device.memory.held["activations"] == held


LOWEST = {
    "q of layer 1": (("layers.1.self_attn.q_proj",), {1, 2}, ("attention", "rope", "gate")),
    "down of layer 2": (("layers.2.mlp.down_proj",), {2}, ()),
    "up of layer 2": (("layers.2.mlp.up_proj",), {2}, ("gate",)),
    "o of layer 0, up of layer 2": (("layers.0.self_attn.o_proj", "layers.2.mlp.up_proj"), {0, 1, 2}, ("gate",)),
}


def backward_labels(tiny) -> list[str]:
    """The records of the backward, in their order."""
    sections = tiny.engine().plan("train", 64).plan.sections
    return [record.label for name in sections if name.startswith("backward ") for record in sections[name]]


@pytest.mark.parametrize("targets, layers, ops", LOWEST.values(), ids=LOWEST)
def test_work_below_the_lowest_adapter_is_not_recorded(device, kernels, targets, layers, ops):
    lora = LoraConfig(4, 8, targets)
    tiny = Tiny(device, kernels, tiny_config(count=3), lora)
    labels = backward_labels(tiny)
    assert {int(label.split("/")[0].removeprefix("layers.")) for label in labels} == layers
    lowest = [label for label in labels if label.startswith(f"layers.{min(layers)}/")]
    for op in ("attention", "rope", "gate"):
        found = any(f"/{op}" in label and ("backward" in label or "dq" in label) for label in lowest)
        assert found == (op in ops), op
    assert len(labels) < len(backward_labels(Tiny(device, kernels, tiny_config(count=3))))


def test_the_input_gradient_of_the_lowest_projection_is_not_computed(device, kernels):
    """With only q_proj of layer 0: its adapter's gradient, but no product with W and no norm before it."""
    tiny = Tiny(device, kernels, tiny_config(count=1), LoraConfig(4, 8, ("q_proj",)))
    labels = backward_labels(tiny)
    after_rope = labels[max(i for i, label in enumerate(labels) if "rope" in label) + 1 :]
    assert not any("rmsnorm:backward" in label for label in after_rope)
    assert sum("matmul" in label for label in after_rope) == 3  # dh, dB, dA


@pytest.mark.parametrize("where", ["params", "weights"])
def test_a_bad_step_touches_nothing_and_is_named(device, kernels, where):
    tiny = Tiny(device, kernels)
    engine = tiny.engine()
    engine.step(step_batches(), 1, 1e-3)
    good = state_of(engine)
    bad = {name: t.copy() for name, t in good["params"].items()}
    bad["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"][3, 1] = np.inf
    if where == "params":
        engine.load("params", bad)
    else:
        device.write(tiny.model.layers[1].norms["attn_in"], np.full(48, np.nan, np.float32))
    engine.step(step_batches(), 2, 1e-3)
    state = engine.steps_state()
    assert (state.bad_run, state.bad_total, state.steps) == (1, 1, 2)
    name = engine.non_finite.names[state.record]
    assert name in ("loss", "gradient norm", "layers.1.gate_up", "layers.1.post_attention")
    after = state_of(engine)
    assert same_bytes({k: after[k] for k in "mv"}, {k: good[k] for k in "mv"})
    kept = bad if where == "params" else good["params"]
    assert all(np.array_equal(t, kept[name], equal_nan=True) for name, t in after["params"].items())
    if where == "params":  # a good step ends the run of bad steps, but keeps their total
        engine.load("params", good["params"])
        engine.step(step_batches(), 3, 1e-3)
        state = engine.steps_state()
        assert (state.bad_run, state.bad_total) == (0, 1)


def test_tensors_survive_the_padding_of_ranks(device, kernels):
    lora = replace(ALL, r=3, rank_pattern={"q_proj": 1, "down_proj": 18})
    tiny = Tiny(device, kernels, lora=lora)
    engine = tiny.engine()
    got = engine.tensors()
    assert got.keys() == tiny.tensors.keys()
    assert all(np.array_equal(got[name], t) for name, t in tiny.tensors.items())
    engine.load("m", tiny.tensors)
    assert all(np.array_equal(t, tiny.tensors[name]) for name, t in engine.tensors("m").items())


def test_what_does_not_fit_is_named(dense):
    engine = dense.engine(32)
    with pytest.raises(ValueError, match="64 rows exceed the capacity of 32"):
        engine.plan("train", 64)
    with pytest.raises(ValueError, match="differ from the layout"):
        engine.load("params", {})
    wrong = {name: t.T for name, t in dense.tensors.items()}
    with pytest.raises(ValueError, match="wanted"):
        engine.load("params", wrong)


def test_a_model_without_adapter(dense):
    """With B = 0, the loss is that of the bare model."""
    bare = Engine(dense.device, dense.model, Options(64, 64), kernels=dense.kernels)
    batch = step_batches()[0]
    zeroed = dense.engine(tensors={n: t * ("lora_A" in n) for n, t in dense.tensors.items()})
    logits = [engine.logits(batch, np.arange(23)) for engine in (bare, zeroed)]
    assert np.array_equal(*logits)
    assert relative_error(dense.engine().logits(batch, np.arange(23)), logits[0]) > 1e-2
    bare.begin()
    bare.evaluate(batch)
    zeroed.begin()
    zeroed.evaluate(batch)
    assert bare.loss_sum() == zeroed.loss_sum()


def test_overfitting_eight_samples(device, kernels):
    """Samples of 31 different ids, identified by the first: everything after it can be learned."""
    config = tiny_config(hidden=32, count=1, vocab_size=31)
    tiny = Tiny(device, kernels, config, replace(ALL, r=16, alpha=32))
    samples = [replace(s, labels=s.input_ids) for s in random_samples((8,) * 8, 31, seed=4)]
    for i, sample in enumerate(samples):
        sample.input_ids[0] = i
    batch, steps = flatten(samples, 64), 150
    engine = tiny.engine(positions=16)
    for step in range(1, steps + 1):
        engine.step([batch], step, 2e-2 * min(1.0, 2 * (steps + 1 - step) / steps))
    assert engine.loss_sum() / batch.targets < 0.05
