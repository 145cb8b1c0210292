"""Batches of sequences that come and go: every answer is the one that the sequence gets alone."""

import numpy as np
import pytest
from golden_case import GOLDEN

from lorawgpu.errors import UserError
from lorawgpu.generate.batch import BatchDecoder, Row, cache_for, encode, step_rows
from lorawgpu.generate.plans import Shared
from lorawgpu.generate.sampling import Sampling
from lorawgpu.generate.slots import Slots
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.model.context import AdapterBuffers

TOKENS = 10


@pytest.fixture(scope="module")
def shared(llm, device, kernels):
    return Shared.create(device, llm.model, cache_for(device, llm.config, 4096), 160, 64, kernels)


@pytest.fixture(scope="module")
def decoders(llm, device, shared):
    """With the golden adapter, with the same after three steps, and without."""
    expected = np.load(GOLDEN / "llama_dense" / "expected.npz")
    stepped = {k.removeprefix("after3."): v for k, v in expected.items() if k.startswith("after3.")}
    flat = device.upload(AdapterLayout(llm.layout.lora, llm.config).flatten(stepped), label="adapter")
    return [BatchDecoder(shared, a) for a in (llm.buffers, AdapterBuffers(llm.layout, flat), None)]


def row(llm, slots, i, sampling=Sampling()):  # noqa: B008 (frozen)
    ids = llm.encode(f"{'some words ' * (i % 4)}number {i}", raw=True)
    return Row(ids, sampling, stream=i, slots=slots.take(len(ids) + TOKENS))


def run(batches, chunks):
    """Process the rows of (decoder, rows) for `chunks` of tokens. Returns the answers, by batch."""
    for decoder, rows in batches:
        while any(r.waits for r in rows):
            decoder.prefill(rows)
    starts = [[len(r.ids) for r in rows] for _, rows in batches]
    for tokens in chunks:
        for decoder, rows in batches:
            decoder.begin(rows)
        batches[0][0].submit(encode(batches, tokens))
        for decoder, rows in batches:
            for r, chosen in zip(rows, decoder.chosen(len(rows), 0, tokens).tolist(), strict=False):
                r.done += tokens
                r.ids += chosen
    return [
        [r.ids[s:] for r, s in zip(rows, begun, strict=True)] for (_, rows), begun in zip(batches, starts, strict=True)
    ]


def test_an_answer_is_the_same_alone_and_in_any_batch(llm, decoders):
    """Twenty rows of three adapters, greedy and sampled, in chunks; against each row alone, and against `generate`."""
    sampled = Sampling(temperature=1.0, top_p=0.9, seed=3)

    def rows(slots, decoder):
        return [row(llm, slots, i, sampled if i % 3 == 2 else Sampling()) for i in range((11, 8, 1)[decoder])]

    slots = Slots(4096 * 2)
    together = run([(d, rows(slots, i)) for i, d in enumerate(decoders)], (1, 4, 5))
    for i, decoder in enumerate(decoders):
        for alone, want in zip(rows(Slots(4096), i), together[i], strict=True):
            assert run([(decoder, [alone])], (TOKENS,)) == [[want]]
    prompts = [f"{'some words ' * (i % 4)}number {i}" for i in (0, 1)]
    for decoder, use in ((0, True), (2, False)):
        text = llm.generate(prompts[0], raw=True, max_new_tokens=TOKENS, use_adapter=use)
        assert llm.prompts.tokenizer.decode(together[decoder][0], skip_special=True).startswith(text)
    assert together[0][0] != together[1][0] != together[2][0]


def test_a_prompt_is_scored_as_logits_are(llm, decoders):
    """A prompt in two passes next to another one, against the scorer of the Python API."""
    slots, scored = Slots(4096), Row(list(range(5, 105)))
    scored.slots, other = slots.take(120), row(llm, slots, 1)
    got, rows = np.zeros((99, llm.config.vocab_size)), [other, scored]
    while scored.waits:
        for r, first, passed in decoders[0].prefill(rows):
            for some, logits in decoders[0].prompt_logits(passed) if r is scored else ():
                at = first + some.start - passed.start
                got[at : at + len(some)] = logits
    want = llm.logits(scored.ids)[:-1]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_bad_value_stays_with_its_adapter(llm, device, shared, decoders):
    flat = device.upload(np.full(llm.layout.size, np.nan, np.float32), label="adapter")
    broken, slots = BatchDecoder(shared, AdapterBuffers(llm.layout, flat)), Slots(4096)
    rows, well = [row(llm, slots, 0)], [row(llm, slots, 1)]
    (bad,), (good,) = run([(broken, rows), (decoders[0], well)], (2,))
    assert bad == [[0xFFFFFFFF] * 2][0] and 0xFFFFFFFF not in good
    assert "layers.0" in broken.recover(rows)
    fresh = Row(llm.encode("number 0", raw=True), slots=rows[0].slots)
    (again,) = run([(decoders[0], [fresh])], (4,))
    assert 0xFFFFFFFF not in again[0]


def test_slots_are_lent_and_merged():
    slots = Slots(5 * 128 + 7)
    a, b, c = slots.take(1), slots.take(129), slots.take(200)
    assert (a, b, c) == (range(0, 128), range(128, 384), range(384, 640)) and slots.take(1) is None
    slots.give(b)
    assert slots.take(257) is None and slots.take(100) == range(128, 256)
    slots.give(range(128, 256))
    slots.give(c)
    slots.give(a)
    assert slots.take(640) == range(0, 640)


def test_steps_have_few_sizes():
    assert [step_rows(n) for n in (1, 2, 3, 5, 8, 9, 17, 64)] == [1, 2, 4, 8, 8, 16, 24, 64]


def test_a_cache_beyond_a_binding_is_refused(llm, device):
    with pytest.raises(UserError, match="wanted at most"):
        cache_for(device, llm.config, 1 << 40)
