"""The whole reference model against central differences, along one random direction for each adapter tensor."""

from dataclasses import replace

import numpy as np
import pytest
from gradcheck import check_gradients, relative_error

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.doctor.tiny_models import tiny_config
from lorawgpu.families.rope import Rope
from lorawgpu.reference import model as reference
from lorawgpu.reference.model import ReferenceModel, adapter_names, step_gradients


def config_of(family):
    """Two layers, HD unequal to C/NH, two query heads on each of two key/value heads."""
    widths = {"vocab_size": 11, "hidden": 6, "width": 10, "head_dim": 4}
    return tiny_config(family, heads=4, kv_heads=2, rope=Rope(100.0), **widths)


def tiny_model(family, rank=2):
    config, rng = config_of(family), np.random.default_rng(3)
    weights = {"model.embed_tokens.weight": rng.standard_normal((11, 6)), "model.norm.weight": rng.uniform(1, 2, 6)}
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = rng.standard_normal((11, 6))
    adapter, scale = {}, {}
    for layer, spec in enumerate(config.layers):
        for name, shape in spec.norm_shapes().items():
            weights[f"model.layers.{layer}.{name}.weight"] = rng.uniform(1, 2, shape)
        for name, (out, n) in spec.linear_shapes().items():
            linear = f"model.layers.{layer}.{name}"
            ternary = rng.integers(-1, 2, (out, n)), rng.uniform(0.2, 0.5)
            weights[f"{linear}.weight"] = ternary if config.ternary else rng.standard_normal((out, n)) / np.sqrt(n)
            a, b = adapter_names(linear)
            adapter[a], adapter[b] = rng.standard_normal((rank, n)), 0.3 * rng.standard_normal((out, rank))
            scale[linear] = 0.5
    return ReferenceModel(config, weights, adapter, scale)


def sample(n, seed):
    ids = np.random.default_rng(seed).integers(0, 11, n)
    return Sample(ids, np.where(np.arange(n) % 3, ids, -100))  # some tokens without loss


SAMPLES = [sample(5, 1), sample(3, 2)]


def directional(model, batches):
    """(forward, backward, inputs) for check_gradients: one coefficient for each adapter tensor's direction."""
    rng = np.random.default_rng(4)
    directions = {name: rng.standard_normal(p.shape) for name, p in model.adapter.items()}

    def moved(t):
        return replace(model, adapter={name: p + t[name] * directions[name] for name, p in model.adapter.items()})

    def forward(**t):
        return step_gradients(moved(t), batches)[0]

    def backward(dy, **t):
        grads = step_gradients(moved(t), batches)[1]
        return {name: dy * np.array([(g * directions[name]).sum()]) for name, g in grads.items()}

    return forward, backward, {name: np.zeros(1) for name in model.adapter}


def bitnet():
    return replace(tiny_model("bitnet"), residuals={})


@pytest.mark.parametrize(
    "model",
    [tiny_model("llama"), bitnet(), replace(tiny_model("llama"), dropout=0.3), replace(bitnet(), dropout=0.3)],
    ids=["llama", "bitnet", "llama dropout", "bitnet dropout"],
)
def test_every_adapter_gradient(model):
    check_gradients(*directional(model, [flatten(SAMPLES, 10)]))


def frozen_keys_and_values(right):
    def backward(*args, **options):
        dq, dk, dv = right(*args, **options)
        return dq, 0.0 * dk, 0.0 * dv

    return backward


def rotated_twice(right):
    def wrong(dy, x, head_dim, *, tables=None, **options):
        tables = tables and (tables[0], -tables[1])
        return right(dy, x, head_dim, tables=tables, **options)

    return wrong


# Description of the fault -> (function of reference.model, how to make the faulty one from the right one).
FAULTS = {
    "keys and values frozen": ("attention_backward", frozen_keys_and_values),
    "rope not inverted": ("heads_backward", rotated_twice),
    "norm without its mean term": ("rmsnorm_backward", lambda right: lambda dy, x, w, rstd: dy * w * rstd[:, None]),
    "quantizer stops the gradient": ("quantize_backward", lambda right: lambda dy: 0.0 * dy),
    "skip connection dropped": ("block_backward", lambda right: lambda m, i, dx, *rest: right(m, i, dx, *rest) - dx),
    "dropout forgotten": ("lora_backward", lambda right: lambda *args: right(*args[:6])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault, monkeypatch):
    forward, backward, inputs = directional(replace(bitnet(), dropout=0.3), [flatten(SAMPLES, 8)])
    name, broken = FAULTS[fault]

    def faulty(dy, **t):
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, broken(getattr(reference, name)))
            return backward(dy, **t)

    with pytest.raises(AssertionError, match="gradients off"):
        check_gradients(forward, faulty, inputs)


def test_held_residuals_are_the_quantizer_where_they_were_recorded():
    batches, model = [flatten(SAMPLES, 8)], tiny_model("bitnet")
    loss, grads = step_gradients(model, batches)
    held_loss, held_grads = step_gradients(replace(model, residuals={}), batches)
    assert held_loss == pytest.approx(loss, rel=1e-12)
    assert all(relative_error(held_grads[name], grads[name]) < 1e-12 for name in grads)


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_split_packing_and_tail_do_not_change_gradients(family):
    """One micro-batch, with and without tail tokens, or a step of two: the same mean over all targets."""
    model = tiny_model(family)
    loss, grads = step_gradients(model, [flatten(SAMPLES, 8)])
    for batches in ([flatten(SAMPLES, 16)], [flatten([s], 8) for s in SAMPLES]):
        other_loss, other = step_gradients(model, batches)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert all(relative_error(other[name], grads[name]) < 1e-10 for name in grads)


def test_an_adapter_of_one_linear_gets_the_same_gradient():
    model = tiny_model("llama")
    full = step_gradients(model, [flatten(SAMPLES, 8)])[1]
    zeroed = {name: p * (".0.self_attn.q_proj." in name) for name, p in model.adapter.items()}
    only = {name: p for name, p in zeroed.items() if ".0.self_attn.q_proj." in name}
    expected = step_gradients(replace(model, adapter=zeroed), [flatten(SAMPLES, 8)])[1]
    got = step_gradients(replace(model, adapter=only), [flatten(SAMPLES, 8)])[1]
    assert got.keys() == only.keys()
    assert all(relative_error(got[name], expected[name]) < 1e-12 for name in only)
    assert any(relative_error(full[name], expected[name]) > 1e-3 for name in only)


def test_dropout_is_new_each_step_and_micro_batch_and_repeatable():
    model, batch = replace(tiny_model("llama"), dropout=0.5), flatten(SAMPLES, 8)
    losses = [step_gradients(model, [batch], seed, step)[0] for seed, step in ((0, 1), (0, 2), (1, 1), (0, 1))]
    assert losses[0] == losses[3] and len(set(losses)) == 3
    two = step_gradients(model, [batch, batch], 0, 1)[0]
    assert two != losses[0]
