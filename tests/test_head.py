"""The head runs in chunks over target rows: the same results as all rows at once, with few idle rows."""

from dataclasses import replace

import numpy as np
import pytest
from gradcheck import relative_error
from tiny_model import Tiny, gradients, random_samples, tiny_config

from lorawgpu.data.batching import flatten
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.gpu import KernelCache, open_dry_device
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import init_adapter
from lorawgpu.model import head as model_head
from lorawgpu.model.context import Context
from lorawgpu.model.head import CHUNK_ALIGN, Head
from lorawgpu.ops.matmul import tuning
from lorawgpu.optim.adamw import AdamW
from lorawgpu.weights.synthetic import SHAPES, empty_model


@pytest.fixture(scope="module")
def dense(device, kernels):
    return Tiny(device, kernels, tiny_config(count=1))


def batch_of(*lengths):
    """Sequences in which every token but the first is a target."""
    return flatten([replace(s, labels=s.input_ids) for s in random_samples(lengths)], 256)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_in_chunks(device, kernels, monkeypatch, tied):
    """With a budget of one chunk of 64 rows: the same loss, logits and gradients as all rows at once."""
    tiny = Tiny(device, kernels, tiny_config(tie_word_embeddings=tied))
    batch = batch_of(70, 50, 30)
    whole = tiny.engine(256, 128)
    loss, grads = gradients(whole, [batch])
    monkeypatch.setattr(model_head, "LOGITS_BUDGET", 1)
    chunked = tiny.engine(256, 128)
    assert chunked.plan("train", 256).head.chunk == 64 < batch.targets < whole.plan("train", 256).head.chunk
    other_loss, other = gradients(chunked, [batch])
    assert other_loss == loss
    assert all(np.array_equal(g, other[name]) for name, g in grads.items())
    rows = np.array([149, 0, 64, 63])  # any rows, in any order
    assert np.array_equal(chunked.logits(batch, rows), whole.logits(batch, np.arange(150))[rows])


def test_a_short_batch_runs_only_the_chunks_it_needs(dense, monkeypatch):
    monkeypatch.setattr(model_head, "LOGITS_BUDGET", 1)
    recorded = dense.engine(256).plan("train", 256)
    assert [len(recorded.head.sections(n)) for n in (1, 64, 65, 256)] == [1, 1, 2, 4]
    assert recorded.flops(1) == recorded.flops(64) < recorded.flops(65) < recorded.flops(256)


@pytest.mark.parametrize(
    "vocab, binding", [(128256, 2 << 30), (128256, 128 << 20), (49152, 2 << 30), (32000, 128 << 20)]
)
@pytest.mark.parametrize("capacity", [320, 384, 1280, 2560, 4096])
def test_no_smaller_plan_needs_more_than_the_largest(vocab, binding, capacity):
    """Otherwise a run would take more memory than planned in the middle of training, such as 100 to 500 MiB of logits.

    Only split sums may be a little larger, because fewer rows are split further.
    """
    device = open_dry_device()
    device.limits["max-storage-buffer-binding-size"] = device.limits["max-buffer-size"] = binding
    config = tiny_config(vocab_size=vocab, count=1)
    engine = Tiny(device, KernelCache(device), config).engine(capacity)
    engine.plan("eval", capacity)
    held = device.memory.held["activations"]
    for rows in range(64, capacity, 64):
        engine.plan("train", rows), engine.plan("eval", rows)
    assert device.memory.held["activations"] - held < 16 << 20


@pytest.mark.parametrize("binding", [2 << 30, 128 << 20])
def test_splits_and_pairs_take_no_memory(monkeypatch, binding):
    """They fit into buffers that are free: with more of them, a plan needs no more."""
    config = replace(SHAPES["llama-3.2-1b"], layers=SHAPES["llama-3.2-1b"].layers[:2])

    def planned():
        device = open_dry_device()
        device.limits["max-storage-buffer-binding-size"] = device.limits["max-buffer-size"] = binding
        lora = LoraConfig(r=16, alpha=32, target_modules=config.all_linear())
        adapter = AdapterLayout(lora, config), init_adapter(lora, config, 0)
        model = empty_model(device, config, lambda name: "bf16")
        engine = Engine(device, model, Options(1024, 512, checkpointing=True), *adapter, AdamW(), KernelCache(device))
        labels = [r.label for some in engine.plan("train", 1024).plan.sections.values() for r in some]
        return device.memory.held["activations"], sum("dkv_pairs" in label for label in labels)

    held, pairs = planned()
    monkeypatch.setattr(Context, "room", property(lambda c: 0, lambda c, value: None), raising=False)
    assert planned() == (held, 0) and pairs == (2 if binding > 1 << 30 else 0)


@pytest.mark.parametrize("chunk", [64, 128, 192, 320, 1024])
def test_spans_cover_the_targets_and_waste_little(chunk):
    head, rows, needed = Head(chunk, *[None] * 5), 2 * chunk + 80, set()
    for targets in range(1, rows + 1):
        spans = head.spans(targets)
        assert [start for start, _ in spans] == list(np.cumsum([0, *(n for _, n in spans[:-1])]))
        assert 0 <= sum(n for _, n in spans) - targets < chunk / 4 + CHUNK_ALIGN
        assert all(n <= chunk and n % CHUNK_ALIGN == 0 for _, n in spans)
        needed.update(spans)
    assert sorted(head.all_spans(rows)) == sorted(needed)  # these are recorded: none is missing or unused


@pytest.mark.parametrize("kind", ["train", "eval", "logits"])
def test_every_plan_has_the_heads_of_any_number_of_targets(dense, monkeypatch, kind):
    monkeypatch.setattr(model_head, "LOGITS_BUDGET", 4 * 128 * dense.model.head.rows)
    recorded = dense.engine(256).plan(kind, 256)
    heads = {name for targets in range(1, 257) for name in recorded.head.sections(targets)}
    assert recorded.head.chunk == 128 and len(heads) == 4
    assert heads == {name for name in recorded.plan.sections if name.startswith("head")}


@pytest.mark.parametrize("chunk, spans", [(256, [(0, 192)]), (128, [(0, 128), (128, 64)])])
def test_a_tail_computes_what_a_whole_chunk_does(device, kernels, monkeypatch, chunk, spans):
    """The same bits, except for gradients, which are split further with fewer rows."""
    tiny = Tiny(device, kernels, tiny_config(vocab_size=1024))
    monkeypatch.setattr(model_head, "LOGITS_BUDGET", 4 * chunk * 1024)
    few = tuning.Line(replace(tuning.LARGE, spread=4), "so that a shorter tail is split further")
    monkeypatch.setattr(tuning, "TABLE", (few,))
    batch = batch_of(90, 60)
    with monkeypatch.context() as patch:
        patch.setattr(model_head, "TAIL_SIZES", 1)
        whole = tiny.engine(256, 256)
        loss, grads = gradients(whole, [batch])
        logits = whole.logits(batch, np.arange(150))
    engine = tiny.engine(256, 256)
    assert engine.plan("train", 256).head.spans(batch.targets) == spans
    gradients(engine, [batch_of(250)])  # what it leaves in the buffers must have no effect
    other_loss, other = gradients(engine, [batch])
    assert other_loss == loss
    assert all(relative_error(other[name], g) < 1e-6 for name, g in grads.items())
    assert np.array_equal(engine.logits(batch, np.arange(150)), logits)
    engine.begin()
    engine.evaluate(batch)
    assert engine.loss_sum() == loss
