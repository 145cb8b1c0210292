"""Decoding with the KV cache against golden logits and greedy texts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import wgpu
from golden_case import GOLDEN, SMALL_CASES
from tiny_model import Tiny, tiny_config

from lorawgpu.data.batching import Sample, flatten
from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.families.spec import Norms
from lorawgpu.generate.decoder import Decoder
from lorawgpu.generate.generator import Generator
from lorawgpu.generate.sampling import Sampling
from lorawgpu.gpu import Device, KernelCache
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.model.context import AdapterBuffers
from lorawgpu.ops.matvec import MAX_ROWS
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint

CONTEXT = 128
EVERY_NORM = Norms(q="q", k="k", attn_sub="attn_sub", mlp_sub="mlp_sub", attn_out="attn_out", mlp_out="mlp_out")


@pytest.fixture(scope="module", params=SMALL_CASES)
def case(request, device: Device, kernels: KernelCache):
    return open_case(request.param, device, kernels)


@pytest.fixture(scope="module")
def dense(device, kernels):
    return open_case("llama_dense", device, kernels)


def open_case(name, device, kernels):
    """A golden case on the device: model, two adapters (as given, and after three optimizer steps), its sequences."""
    folder = GOLDEN / name
    checkpoint = open_checkpoint(folder)
    lora, tensors = read_adapter(folder / "adapter_init", checkpoint.config)
    layout = AdapterLayout(lora, checkpoint.config)
    expected, arrays = dict(np.load(folder / "expected.npz")), np.load(folder / "batch.npz")

    def adapter(tensors):
        return AdapterBuffers(layout, device.upload(layout.flatten(tensors)))

    stepped = {key.removeprefix("after3."): value for key, value in expected.items() if key.startswith("after3.")}
    mask = arrays["attention_mask"].astype(bool)
    return SimpleNamespace(
        device=device,
        kernels=kernels,
        settings=json.loads((folder / "case.json").read_text()),
        expected=expected,
        sequences=[ids[keep].tolist() for ids, keep in zip(arrays["input_ids"], mask, strict=True)],
        model=load_model(device, checkpoint),
        adapter=adapter(tensors),
        stepped=adapter(stepped),
    )


def decoder(case, adapter, sequences=1, **options):
    return Decoder(
        case.device,
        case.model,
        adapter,
        context=CONTEXT,
        sequences=sequences,
        prefill_rows=32,
        kernels=case.kernels,
        **options,
    )


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def tolerance(case, phase, quantity):
    """The golden cases' rule: five drifts of float32, or one flipped rounding where the margin is thin."""
    if case.settings.get("rounding_margin", {}).get(phase, 1) < 3e-6:
        return 5e-2
    return max(1e-4, 5 * case.settings["float32_vs_float64"][quantity])


def decoded(decoder, sequences, prompt):
    """Logits after each token from number `prompt` on, appended one by one to all sequences: [B, tokens, V]."""
    count, length = len(sequences), min(map(len, sequences))
    decoder.start([s[:prompt] for s in sequences])
    logits = [decoder.read_logits(count)]
    for i in range(prompt, length):
        decoder.extend([[s[i]] for s in sequences])
        logits.append(decoder.read_logits(count))
    return np.stack(logits, 1)


@pytest.mark.parametrize("prompt", [1, 5])
def test_decoding_equals_the_whole_sequence(case, prompt):
    sequences = [s[:24] for s in case.sequences]  # 80 tokens one by one add time, not proof
    got = decoded(decoder(case, case.adapter, len(sequences)), sequences, prompt)
    want = case.expected["logits"][:, prompt - 1 : prompt - 1 + got.shape[1]]
    assert relative(got, want) < tolerance(case, "loss", "logits")


def test_greedy_text(case):
    """The expected token is appended, so that a near tie does not hide what follows."""
    run = decoder(case, case.stepped)
    run.start([case.expected["greedy_prompt"].tolist()])
    allowed = 0.1 if case.settings.get("rounding_margin", {}).get("greedy", 1) < 3e-6 else 1e-3
    for token, gap in zip(case.expected["greedy"], case.expected["greedy_gap"], strict=True):
        assert run.read_logits(1)[0].argmax() == token or gap < allowed
        run.extend([[token]])


def test_batched_equals_single(dense):
    """Bit for bit: a row's sums do not depend on its neighbors, nor a sequence on the place of its slots."""
    sequences = [dense.sequences[0][:40], dense.sequences[1][:9], dense.sequences[2][:17]]
    together = decoder(dense, dense.adapter, 3)
    together.start(sequences)
    together.extend([[5], [6], [7]])
    alone = decoder(dense, dense.adapter, 1)
    for b, sequence in enumerate(sequences):
        alone.start([sequence])
        alone.extend([[5 + b]])
        np.testing.assert_array_equal(alone.read_logits(1)[0], together.read_logits(3)[b])


def test_a_sequence_past_the_context_is_refused(dense):
    run = decoder(dense, None)
    with pytest.raises(UserError, match="129 tokens exceed the context of 128"):
        run.start([[1] * 129])
    run.start([[1] * 128])
    with pytest.raises(UserError, match="129 tokens"):
        run.extend([[1]])


def answers(run, prompts, sampling=Sampling(), max_new_tokens=10, stop=(), **options):  # noqa: B008 (frozen)
    """Answers by sequence, and why each ended."""
    generator, texts = Generator(run, stop), [[] for _ in prompts]
    for b, token in generator.stream(prompts, sampling, max_new_tokens, **options):
        texts[b].append(token)
    return texts, generator.reasons


def by_host_argmax(run, prompt, tokens):
    """The greedy answer by the host's own argmax."""
    run.start([prompt])
    answer = []
    for _ in range(tokens):
        answer.append(int(run.read_logits(1)[0].argmax()))
        run.extend([[answer[-1]]])
    return answer


def test_the_gpu_feeds_itself_what_the_host_would(case):
    prompt = case.sequences[0][:5]
    want = by_host_argmax(decoder(case, case.adapter), prompt, 19)
    got, reasons = answers(decoder(case, case.adapter), [prompt], max_new_tokens=19)
    assert got == [want] and reasons == ["length"]


def test_draws_do_not_depend_on_the_batch(dense):
    sampling = Sampling(1.2, top_k=30, top_p=0.95, repetition_penalty=1.1, seed=3)
    prompts = [dense.sequences[0][:40], dense.sequences[1][:9], dense.sequences[2][:17]]
    together, _ = answers(decoder(dense, dense.adapter, 3), prompts, sampling)
    alone = decoder(dense, dense.adapter)
    for b, prompt in enumerate(prompts):
        assert answers(alone, [prompt], sampling, streams=[b])[0] == [together[b]]
    assert answers(alone, prompts[:1], replace(sampling, seed=4))[0] != [together[0]]


def test_an_answer_ends_at_a_stop_token_a_length_or_the_context(dense):
    run, prompts = decoder(dense, None, 2), [dense.sequences[0][:7], dense.sequences[1][:9]]
    free, _ = answers(run, prompts, max_new_tokens=12)
    stop = free[0][4]
    got, reasons = answers(run, prompts, max_new_tokens=12, stop=[stop])
    for b in (0, 1):
        ends = stop in free[b]
        assert got[b] == (free[b][: free[b].index(stop)] if ends else free[b])
        assert reasons[b] == ("stop" if ends else "length")
    long = decoder(dense, None)
    got, reasons = answers(
        long, [dense.sequences[0][:5] * 24], max_new_tokens=50
    )  # 120 tokens; the last one is not processed
    assert reasons == ["context"] and len(got[0]) == CONTEXT - 120 + 1
    assert answers(long, prompts[:1], max_new_tokens=0) == ([[]], ["length"])


def test_a_kept_beginning_gives_the_same_answer(dense):
    run, prompt = decoder(dense, dense.adapter), dense.sequences[0][:20]
    first, _ = answers(run, [prompt])
    follow = prompt + first[0] + [3, 4, 5]
    again, _ = answers(run, [follow], reuse=True)
    assert again == answers(decoder(dense, dense.adapter), [follow])[0]
    other = prompt[:11] + [7]  # a conversation with the same beginning and another end
    assert answers(run, [other], reuse=True) == answers(decoder(dense, dense.adapter), [other])


def test_values_that_are_not_finite_end_it(dense):
    params = dense.device.upload(np.full(dense.adapter.params.size, np.nan, np.float32))
    run, prompts = decoder(dense, AdapterBuffers(dense.adapter.layout, params), 2), [[1, 2, 3], [4, 5]]
    with pytest.raises(CheckFailed, match="not finite, first in layers.0.gate_up"):
        answers(run, prompts)
    dense.device.write(params, dense.device.read(dense.adapter.params))
    assert answers(run, prompts) == answers(decoder(dense, dense.adapter, 2), prompts)  # no trace is left


def test_nothing_is_created_while_tokens_are_made(dense):
    run = decoder(dense, dense.adapter)
    answers(run, [[1, 2, 3]])
    before = diagnostics()
    answers(run, [[1, 2, 3]])
    assert diagnostics() == before


def test_once_prepared_nothing_is_allocated(dense):
    run = decoder(dense, dense.adapter)
    run.prepare()
    held = dict(dense.device.memory.held)
    for length in (2, 9, 40):
        answers(run, [[1] * length])
    del held["plan"], (now := dict(dense.device.memory.held))["plan"]
    assert now == held


def test_fewer_sequences_than_were_begun_go_on(dense):
    """Each as if it were the only one; the others wait."""
    run = decoder(dense, dense.adapter, 2)
    run.start([[1, 2, 3], [4, 5]], streams=[7, 8])
    run.extend([[6]])
    alone = decoder(dense, dense.adapter)
    alone.start([[1, 2, 3]])
    alone.extend([[6]])
    assert np.array_equal(run.read_logits(1), alone.read_logits(1))


def test_a_token_takes_few_dispatches(case):
    """With small layers, a dispatch costs more than its arithmetic: 14 per layer, 8 for the rest of a step."""
    run = decoder(case, case.adapter)
    layers = case.model.config.num_hidden_layers
    assert len(run.records(1, Sampling())) <= 14 * layers + 8


def diagnostics():
    found = wgpu.diagnostics.object_counts.get_dict()
    return {name: found[name]["count"] for name in ("Buffer", "BindGroup", "ComputePipeline", "ShaderModule")}


def decoding_error(tiny: Tiny) -> float:
    """Of the logits after a prompt of six tokens and three decoded ones, against the whole-sequence pass."""
    engine, ids = tiny.engine(), np.arange(9, dtype=np.int32)
    run = Decoder(engine.device, tiny.model, engine.adapter, context=64, kernels=engine.kernels)
    run.start([ids[:6].tolist()])
    for i in (6, 7, 8):
        run.extend([[i]])
    want = engine.logits(flatten([Sample(ids, ids)], 16), np.array([8]))
    return relative(run.read_logits(1), want)


@pytest.mark.parametrize("family", ["llama", "bitnet"])
def test_head_sizes_that_are_not_vec4s_take_the_prefill_pass(device, kernels, family):
    tiny = Tiny(device, kernels, tiny_config(family))  # HD 10
    assert decoding_error(tiny) < (5e-2 if family == "bitnet" else 1e-4)


@pytest.mark.parametrize("layers", [[EVERY_NORM] * 2, [EVERY_NORM, Norms()]], ids=["equal", "mixed"])
def test_norms_by_role_and_layers_of_their_own_sizes(device, kernels, layers):
    """Decoding against the whole-sequence pass, which is checked against the reference (test_gradients.py)."""
    small = tiny_config(count=1, head_dim=8, norms=layers[0])
    wide = tiny_config(count=1, head_dim=16, heads=4, kv_heads=2, width=100, norms=layers[1])
    tiny = Tiny(device, kernels, replace(small, layers=small.layers + wide.layers))
    assert decoding_error(tiny) < 1e-4  # float32 sums in another order


def test_more_rows_than_matvec_takes(dense):
    prompts = [dense.sequences[0][i : i + 5] for i in range(MAX_ROWS + 1)]
    many, _ = answers(decoder(dense, dense.adapter, len(prompts)), prompts, max_new_tokens=4)
    for b in (0, MAX_ROWS):
        assert answers(decoder(dense, dense.adapter), [prompts[b]], max_new_tokens=4)[0] == [many[b]]
