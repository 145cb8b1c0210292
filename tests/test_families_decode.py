"""Decoding of every family with the KV cache equals the float64 reference of the whole sequence.

The sequences go past the windows of the cases (5 to 9 tokens) and past the lengths at which longrope changes its
frequencies (14 and 24 tokens), and all of them run with the case's adapter.
"""

import time
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from golden_case import FAMILY_CASES, GOLDEN, reference_case

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.generate.batch import BatchDecoder, Row, cache_for
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.plans import Shared
from lorawgpu.generate.sampling import Sampling
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.reference.model import model_forward
from lorawgpu.serve.scheduler import Choice, Scheduler
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint

CONTEXT = 40
TOLERANCE = 2e-5  # float32 noise of tiny models
NEAR = 1e-3  # a choice with a smaller margin may differ
# One for each way to get from a token to the next: on the GPU alone, with windows, and with the host in between.
LOOPS = ("qwen2", "gemma3", "gemma4", "phi3")
PROMPTS = {"single": (4,), "batched": (4, 9, 1)}
STEPS = 8
# Case -> tokens before those that are decoded one by one, where not those of PROMPTS: across longrope's border.
CROSSING = {"phi3": {"single": (20,), "batched": (20, 9, 28)}, "phi3_mixed": {"single": (11,), "batched": (11, 2, 16)}}


@cache
def reference(name):
    return reference_case(name).model


def whole(name, sequences):
    """The reference's logits after the last token of each sequence, float64 [B, V]."""
    samples = [Sample(np.array(ids, np.int32), np.array(ids, np.int32)) for ids in sequences]
    ends = np.cumsum([len(ids) for ids in sequences])
    return model_forward(reference(name), flatten(samples, ends[-1]))[0][ends - 1]


def relative(got, want):
    return np.linalg.norm(got - want, axis=-1).max() / np.linalg.norm(want, axis=-1).min()


@pytest.fixture(scope="module")
def opened(device, kernels):
    """Opens a case on the device: `make(name, sequences)` is a decoder with the case's adapter."""

    @cache
    def parts(name):
        checkpoint = open_checkpoint(GOLDEN / name)
        lora, tensors = read_adapter(GOLDEN / name / "adapter_init", checkpoint.config)
        layout = AdapterLayout(lora, checkpoint.config)
        return load_model(device, checkpoint), AdapterBuffers(layout, device.upload(layout.flatten(tensors)))

    def make(name, sequences, **options):
        options = {"context": CONTEXT, "prefill_rows": 32, "kernels": kernels} | options
        return Decoder(device, *parts(name), sequences=sequences, **options)

    def batches(name):
        """A batch decoder with the case's adapter."""
        model, adapter = parts(name)
        cache = cache_for(device, model.config, 4 * 128)
        return BatchDecoder(Shared.create(device, model, cache, CONTEXT, 32, kernels), adapter)

    return SimpleNamespace(make=make, batches=batches)


def prompts_of(name, kind):
    rng, vocab = np.random.default_rng(sum(name.encode())), reference(name).config.vocab_size
    return [rng.integers(3, vocab, n).tolist() for n in CROSSING.get(name, PROMPTS)[kind]]


def check_extend(decoder, name, kind):
    """Prompts, then tokens one by one, then three at once."""
    sequences, rng = prompts_of(name, kind), np.random.default_rng(1)
    count = len(sequences)
    decoder.start([list(ids) for ids in sequences])
    for new in [0, *[1] * STEPS, 3]:
        more = rng.integers(3, reference(name).config.vocab_size, (count, new)).tolist()
        sequences = [ids + extra for ids, extra in zip(sequences, more, strict=True)]
        if new:
            decoder.extend(more)
        assert relative(decoder.read_logits(count), whole(name, sequences)) < TOLERANCE, list(map(len, sequences))


@pytest.mark.parametrize("kind", ["batched", pytest.param("single", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_extending_equals_the_whole_sequence(opened, name, kind):
    check_extend(opened.make(name, len(PROMPTS[kind])), name, kind)


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_the_prefill_pass_decodes_alike(opened, name):
    check_extend(opened.make(name, len(PROMPTS["batched"]), matvec=False, prefill_rows=8), name, "batched")


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", LOOPS)
def test_the_sampling_loop_chooses_what_the_whole_sequence_says(opened, name, kind):
    sequences = prompts_of(name, kind)
    generator = Generator(opened.make(name, len(sequences)), stop_ids=())
    for b, token in generator.stream([list(ids) for ids in sequences], Sampling(), STEPS):
        (logits,) = whole(name, [sequences[b]])
        assert logits.max() - logits[token] < NEAR, (b, len(sequences[b]))
        sequences[b].append(token)
    assert [len(ids) for ids in sequences] == [len(ids) + STEPS for ids in prompts_of(name, kind)]
    assert generator.reasons == ["length"] * len(sequences)


@pytest.mark.parametrize("name", LOOPS)
def test_answers_that_come_and_go_are_what_the_whole_sequence_says(opened, name):
    """As `serve` decodes: three prompts with places for two, one of which therefore begins in the middle."""
    decoder, turns, failures = opened.batches(name), [], []
    scheduler = Scheduler(decoder.cache.span, 2, 8, turns.extend, failures.append)
    prompts = prompts_of(name, "batched")
    limits = (STEPS // 2, STEPS, STEPS)
    choices = [Choice(Row(list(ids)), decoder, frozenset(), n) for ids, n in zip(prompts, limits, strict=True)]
    scheduler.start()
    scheduler.submit(choices)
    while sum(turn.reason is not None for turn in turns) < len(choices) and not failures:
        time.sleep(0.01)
    scheduler.stop()
    assert failures == [] and all(turn.error is None for turn in turns)
    for choice, ids, n in zip(choices, prompts, limits, strict=True):
        assert len(choice.row.ids) == len(ids) + n
        for end in range(len(ids), len(choice.row.ids)):
            (logits,) = whole(name, [choice.row.ids[:end]])
            assert logits.max() - logits[choice.row.ids[end]] < NEAR, end


@pytest.mark.parametrize("name", CROSSING)
def test_a_prompt_that_shrinks_gets_the_short_frequencies_again(opened, name):
    """The kept beginning of a longer conversation was computed with the long ones."""
    decoder = opened.make(name, 1)
    (ids,) = prompts_of(name, "single")
    longer = ids + [5] * STEPS
    for prompt in (longer, ids, [*ids, 7]):
        decoder.start([list(prompt)], reuse=True)
        assert relative(decoder.read_logits(1), whole(name, [prompt])) < TOLERANCE
