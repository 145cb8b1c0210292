"""What an adapter trains of the embedding and the head: golden cases by PEFT, several buffers, ranks, and a resume."""

import shutil

import numpy as np
import pytest
from golden_case import GOLDEN
from gradcheck import relative_error
from ranks import Ranks
from tiny_model import Tiny, random_samples, tiny_config
from tiny_run import Runs, adapter_bytes, write_config

from lorawgpu.backward import embedding as backward_embedding
from lorawgpu.backward import head as backward_head
from lorawgpu.data.batching import bucket, flatten
from lorawgpu.engine import shards
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.lora import layout as layout_module
from lorawgpu.lora.flat import Buffers
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.model import embedding as model_embedding
from lorawgpu.model import head as model_head
from lorawgpu.optim.adamw import AdamW
from lorawgpu.verify.cases import read_case
from lorawgpu.verify.compare import judge
from lorawgpu.verify.run import run_case
from lorawgpu.weights.device_model import load_model

CASES = ["tokens_gemma2", "lora_ends", "saved_tied", "tokens_untied", "saved_untied", "lora_head"]
SLOW = pytest.mark.long
TOLERANCE = 1e-4


def nothing(*args, **options):
    pass


def without(option):
    """The same function, but it does not hear of an option."""

    def change(function):
        return lambda *args, **options: function(*args, **{k: v for k, v in options.items() if k != option})

    return change


@pytest.mark.parametrize("name", [*CASES[:3], *(pytest.param(name, marks=SLOW) for name in CASES[3:])])
def test_golden_cases(device, kernels, name):
    """Loss, logits, every gradient, three steps and greedy text, by transformers and PEFT in float64."""
    case = read_case(GOLDEN / name)
    row, faults = judge(case, run_case(device, case, kernels))
    assert not faults and row["grad_rel_max"] < 1e-5 and row["greedy_match"]


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_golden_cases_with_other_plans(device, kernels, monkeypatch, name):
    """With checkpointing, and with matrices in several buffers of 16 rows."""
    monkeypatch.setattr(layout_module, "BUFFER", 4096)
    case = read_case(GOLDEN / name)
    row, faults = judge(case, run_case(device, case, kernels, checkpointing=True, attention="chain"))
    assert not faults and row["greedy_match"]


@pytest.fixture(scope="module")
def gradients(device, kernels):
    """gradients(name): the worst relative error of a gradient of a case, recorded anew."""
    kept = {}

    def of(name):
        if name not in kept:
            case = read_case(GOLDEN / name)
            kept[name] = case, load_model(device, case.checkpoint)
        case, model = kept[name]
        rows = bucket(sum(map(len, case.samples)))
        layout = AdapterLayout(case.lora, case.checkpoint.config)
        engine = Engine(device, model, Options(rows, rows), layout, case.tensors, AdamW(), kernels)
        batch = flatten(case.samples, rows)
        engine.begin()
        engine.accumulate(batch)
        got = {name: grad / batch.targets for name, grad in engine.tensors("grads").items()}
        return max(relative_error(got[name], want) for name, want in case.part("grad").items())

    return of


WRONG = {
    "no gradient of a tied head": ("tokens_gemma2", backward_head, "_rows_backward", lambda f: nothing),
    "no gradient of the embedding": ("tokens_gemma2", backward_embedding, "rows_backward", lambda f: nothing),
    "the embedding's scale is lost": ("tokens_gemma2", backward_embedding, "rows_backward", without("scale")),
    "the base's rows in the head": ("tokens_gemma2", model_head, "columns_forward", lambda f: nothing),
    "the base's rows in the embedding": ("tokens_gemma2", model_embedding, "rows_forward", lambda f: nothing),
    "no gradient of a whole head": ("saved_tied", backward_head, "_matrix_backward", lambda f: nothing),
    "LoRA of the embedding unscaled": ("lora_ends", model_embedding, "lora_h", lambda f: unscaled(f)),
}


def unscaled(lora_h):
    def wrong(c, lora, ids):
        scale = lora.scale / c.config.embed_scale
        return lora_h(c, type(lora)(lora.a, lora.b, scale), ids)

    return wrong


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_variants_fail_the_golden_cases(gradients, monkeypatch, fault):
    name, module, function, change = WRONG[fault]
    monkeypatch.setattr(module, function, change(getattr(module, function)))
    assert not gradients(name) < 10 * TOLERANCE


@pytest.mark.parametrize("name", ["tokens_gemma2", "saved_tied", "lora_ends"])
def test_the_same_comparison_passes_what_is_right(gradients, name):
    assert gradients(name) < TOLERANCE


LORA = LoraConfig(4, 8, ("q_proj",), modules_to_save=("lm_head",), trainable_token_indices={"embed_tokens": (7, 3)})
WHOLE = LoraConfig(4, 8, ("v_proj", "lm_head"), modules_to_save=("embed_tokens",))


@pytest.mark.parametrize("lora", [LORA, WHOLE], ids=["rows and a head", "an embedding"])
def test_the_step_of_two_ranks_is_that_of_one(device, kernels, monkeypatch, lora):
    """With matrices in several buffers, and the moments of a rank in several too."""
    monkeypatch.setattr(layout_module, "BUFFER", 2048)
    monkeypatch.setattr(shards, "BUFFER", 2048)
    tiny = Tiny(device, kernels, tiny_config(), lora)
    batches = [flatten(random_samples((9, 14)), 32), flatten(random_samples((20,), seed=1), 32)]
    engine = tiny.engine(dropout=0.2, seed=5)
    assert isinstance(engine.adapter.params, Buffers)
    engine.step(batches, 1, 1e-3)

    def work(exchange):
        ranked = tiny.engine(exchange=exchange, piece_bytes=1024, dropout=0.2, seed=5)
        for number in (1, 2):
            ranked.step(batches, number, 1e-3)
            if number == 1:
                first = ranked.tensors("grads")
        return first, ranked.grad_norm(), {which: ranked.tensors(which) for which in ("params", "m", "v")}

    ranks = Ranks(2).run(work)
    for name, grad in engine.tensors("grads").items():
        assert relative_error(ranks[0][0][name], grad) < 1e-6, name
    engine.step(batches, 2, 1e-3)
    for name, value in engine.tensors("params").items():
        start = tiny.tensors[name]
        assert relative_error(ranks[0][2]["params"][name] - start, value - start) < 1e-4, name
    for which in ("params", "m", "v"):
        assert all(np.array_equal(ranks[0][2][which][name], ranks[1][2][which][name]) for name in engine.tensors())


@pytest.mark.parametrize("lora", [LORA, WHOLE], ids=["rows and a head", "an embedding"])
def test_chunks_and_micro_batches_of_any_size_give_the_same_gradient(device, kernels, lora):
    """A micro-batch whose target rows take several chunks of the head, and each of its samples by itself."""
    tiny, samples = Tiny(device, kernels, tiny_config(), lora), random_samples((150, 90, 60))
    engine = tiny.engine(capacity=384, positions=150)
    engine.begin()
    engine.accumulate(flatten(samples, 384))
    whole = engine.tensors("grads")
    engine.begin()
    for sample in samples:
        engine.accumulate(flatten([sample], bucket(len(sample))))
    for name, grad in engine.tensors("grads").items():
        assert relative_error(grad, whole[name]) < 1e-5, name


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, device, kernels):
    """Rows of a tied head, learned from the model's own."""
    runs = Runs(device, kernels)
    tokens = {"peft_trainable_token_indices": [5, 77, 120], "lora_target_modules": ["q_proj", "down_proj"]}
    tokens |= {"max_steps": 4, "save_steps": 2}
    whole = runs.train(write_config(tmp_path, **tokens))
    assert '"trainable_token_indices": [' in (whole / "adapter_config.json").read_text()
    stopped = tmp_path / "stopped"
    shutil.copytree(whole / "checkpoint-2", stopped / "checkpoint-2")
    again = runs.train(write_config(tmp_path, **tokens, output_dir=str(stopped)), resume="auto")
    assert adapter_bytes(again) == adapter_bytes(whole)
