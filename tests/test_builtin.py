"""The built-in model and chat set: a real BitNet that others can read, data that trains it, a config that shows it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lorawgpu.chat.builtin import BITNET
from lorawgpu.chat.template import ChatTemplate, resolve_template
from lorawgpu.config.load import load_config
from lorawgpu.data.batching import IGNORE
from lorawgpu.data.dataset import DatasetSpec, LoadSettings, Subset, tokenize
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.workers import encode_record
from lorawgpu.engine.engine import Engine, Options
from lorawgpu.engine.evaluation import evaluate_source
from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import Prompts
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.placement import build_engine
from lorawgpu.train.setup import prepare
from lorawgpu.train.trainer import Trainer
from lorawgpu.weights.device_model import load_model
from lorawgpu.weights.loader import open_checkpoint

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "lorawgpu" / "assets"
MODEL, PARTS = "builtin:tiny-bitnet", ("docstrings", "docstrings-heldout")
HELD_OUT_LOSS = 4.2496  # of the base on builtin:docstrings-heldout, as its card says


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(MODEL)


@pytest.fixture(scope="module")
def chats(checkpoint):
    """Each part of the chat set as the model's own samples."""
    tokenizer = checkpoint.tokenizer()
    template = resolve_template(None, None, tokenizer.chat_template, tokenizer.special_tokens)
    settings = EncodeSettings(128, "raise", False, ("assistant",))
    return {
        part: tokenize(DatasetSpec(f"builtin:{part}"), LoadSettings(settings, tokenizer, template, workers=1))
        for part in PARTS
    }


@pytest.fixture(scope="module")
def engine(device, kernels, checkpoint):
    return Engine(device, load_model(device, checkpoint), Options(1024, 512), kernels=kernels)


def messages(part):
    return [json.loads(line)["messages"] for line in (ASSETS / f"{part}.jsonl").read_text("utf-8").splitlines()]


def test_the_model_is_a_small_bitnet(checkpoint):
    config = checkpoint.config
    assert (config.family, config.ternary, config.layers[0].mlp.act) == ("bitnet", "multiply", "relu2")
    assert checkpoint.name == MODEL and config.tie_word_embeddings
    linears = [checkpoint.ternary(name) for name in checkpoint.keys() if name.endswith("_proj.weight")]
    others = [checkpoint.dense(name).data.size for name in checkpoint.keys() if not name.endswith("_proj.weight")]
    assert 1e6 < sum(t.out * t.packed.shape[1] for t in linears) + sum(others) < 3e6
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 4e6
    card = (ASSETS / "tiny-bitnet" / "MODEL_CARD.md").read_text("utf-8")
    assert "PSF-2.0" in card and f"{HELD_OUT_LOSS:.2f}" in card


def test_the_tokenizer_is_byte_exact_and_ends_turns_as_bitnet_does(checkpoint):
    tokenizer = checkpoint.tokenizer()
    text = "def naïve(x):\n\treturn “x”  # 3.14159 \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == checkpoint.config.vocab_size and tokenizer.add_bos
    ends = {tokenizer.token_id("<|end_of_text|>"), tokenizer.token_id("<|eot_id|>")}
    assert set(checkpoint.config.eos_token_ids) == ends <= tokenizer.special_ids
    talk = [{"role": role, "content": f" {role}? "} for role in ("system", "user", "assistant")]
    own, bitnet = (ChatTemplate(t, tokenizer.special_tokens) for t in (tokenizer.chat_template, BITNET))
    for prompt in (True, False):
        assert own.render(talk, add_generation_prompt=prompt) == bitnet.render(talk, add_generation_prompt=prompt)


def test_an_unknown_model_names_those_there_are():
    with pytest.raises(UserError, match="builtin:tiny: no built-in model .* available: .*" + MODEL):
        open_checkpoint("builtin:tiny")


def test_the_chat_set_holds_out_whole_modules(chats):
    modules, answers = [], []
    for part in PARTS:
        questions = [chat[0]["content"].removeprefix("What does ") for chat in messages(part)]
        modules.append({question.split(".")[0] for question in questions})
        answers.append({chat[1]["content"] for chat in messages(part)})
        assert all(answer.startswith("Use ") and " It takes " in answer for answer in answers[-1])
        assert len(chats[part]) == len(questions) and chats[part].counts.missing_eos == 0
    assert not modules[0] & modules[1] and len(answers[1] - answers[0]) > 90


@pytest.mark.long
def test_the_base_scores_on_the_chat_set_what_its_card_says(engine, chats):
    """Weights, tokenizer, template and mask together: any of them changed moves the loss by more than this.

    Flipped roundings (devices differ in the last bits) move a logit by 5e-3, a mean over 2,572 tokens by far less.
    """
    assert evaluate_source(engine, chats["docstrings-heldout"]).loss == pytest.approx(HELD_OUT_LOSS, abs=5e-3)


@pytest.mark.reference
def test_transformers_gives_the_same_loss(engine, chats):
    """BitNetForCausalLM reads the folder; its loss in float32 is ours but for flipped roundings (as above)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ASSETS / "tiny-bitnet"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # unpacks to bfloat16, exactly
    assert type(theirs).__name__ == "BitNetForCausalLM"
    torch.nn.Module.float(theirs)
    samples = Subset(chats["docstrings-heldout"], np.arange(12))
    chat = messages("docstrings-heldout")[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False) == samples[0].input_ids.tolist()
    total = tokens = 0
    for sample in (samples[i] for i in range(len(samples))):
        ids, labels = (torch.from_numpy(a.astype(np.int64))[None] for a in (sample.input_ids, sample.labels))
        with torch.no_grad():
            logits = theirs(input_ids=ids).logits[0, :-1]
        targets = labels[0, 1:]
        total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum").item()
        tokens += int((targets != IGNORE).sum())
    assert evaluate_source(engine, samples).loss == pytest.approx(total / tokens, abs=5e-3)


@pytest.mark.long
def test_the_first_config_shows_what_it_promises(tmp_path, device, kernels):
    """Two thirds of its steps are enough for the held-out loss to fall by a fifth and the manner to change."""
    overrides = ["max_steps=20", f"output_dir={tmp_path / 'out'}", f"dataset_prepared_path={tmp_path / 'cache'}"]
    run = prepare(load_config(ROOT / "configs" / "tiny.yaml", overrides))
    engine = build_engine(run, device, kernels)
    before = evaluate_source(engine, run.data.validation).loss  # B = 0: the base
    assert before == pytest.approx(HELD_OUT_LOSS, abs=5e-3)
    assert Trainer(run, engine).train() == 0
    log = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [r["eval_loss"] for r in log if "eval_loss" in r][-1] < 0.8 * before
    answers = [sample["text"] for r in log if "samples" in r for sample in r["samples"]]
    assert answers and all(answer.startswith("Use ") for answer in answers)


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "tiny_corpus", raising=False)
    import tiny_corpus

    return tiny_corpus


def test_pages_become_passages_of_plain_english(corpus):
    page = corpus.Page()
    page.feed(
        "<div>navigation</div><div class='body' role='main'><section><h1>Heaps<a class='headerlink'>¶</a></h1>"
        "<p>A heap is\na <em>tree</em> for which every parent node has a value less than that of its children.</p>"
        "<div><pre>x = <b>1</b></pre></div><section><h2>Theory</h2><p>Short.</p></section></section>"
        "<section><h2>Next</h2><ul><li><p>The first of the two things that this section has to say.</p></li></ul>"
        "</section></div><div>footer, which is long enough to be a passage of its own if it were read</div>"
    )
    heaps = "Heaps\nA heap is a tree for which every parent node has a value less than that of its children."
    assert page.passages == [heaps, "Next\nThe first of the two things that this section has to say."]


@pytest.mark.parametrize("signature, docstring, answer", [
    ("os.path.join(a, /, *p)", "Join paths.", None),  # not a verb of the list
    ("m.go(path, *, fd=0)", "Remove all the files.\n\nNo.", "Use go to remove all the files. It takes path and fd."),
    ("m.C.tell()", "Returns the position. Or fails.", "Use tell to return the position. It takes no arguments."),
    ("class m.C", "Return nothing at all.", None),
])  # fmt: skip
def test_chats_have_one_manner(corpus, signature, docstring, answer):
    record = corpus.chat(signature, docstring)
    assert (record and record["messages"][1]["content"]) == answer


@pytest.mark.parametrize("answer", ["Yes.", "7", "4 cats", "\N{SLIGHTLY SMILING FACE}", "\xdcber", "(a)", "_x", "\n1"])
def test_what_is_trained_is_what_generation_must_write(answer):
    """The prompt as `generate` asks it, then every trained token, is the conversation as it was trained: also where the
    blank of "Assistant: " does not merge with the answer, and so has to be written first."""
    tokenizer = open_checkpoint(MODEL).tokenizer()
    template = resolve_template(None, None, tokenizer.chat_template, tokenizer.special_tokens)
    messages = [{"role": "user", "content": "is it a cat?"}, {"role": "assistant", "content": answer}]
    encode = Encoder("chat", EncodeSettings(512, "raise", False, ("assistant",)), tokenizer, template)
    sample = encode_record(encode, ("f.jsonl", 1), {"messages": messages})
    prompt = Prompts(tokenizer, template).chat(messages[:1])
    trained = sample.labels != -100
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert not trained[: len(prompt)].any() and trained[len(prompt) :].all()
