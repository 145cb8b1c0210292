"""`lorawgpu.load` and the `generate` command, on the smallest golden model with a tokenizer of bytes."""

import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import yaml
from golden_case import GOLDEN

import lorawgpu
from lorawgpu import api
from lorawgpu import generate as command
from lorawgpu.api import Ended, LoadedModel
from lorawgpu.data.chat import ChatTemplate
from lorawgpu.data.templates import BUILT_IN
from lorawgpu.data.tokenizer import Tokenizer
from lorawgpu.errors import UserError
from lorawgpu.generation.sampling import Sampling
from lorawgpu.generation.text import Prompts, TextStream, template_for
from lorawgpu.model.adapter import read_adapter
from lorawgpu.model.base_name import plain_name
from lorawgpu.model.loader import open_checkpoint

CASE = GOLDEN / "llama_dense"
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def byte_backend():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = [tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROL]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=control,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    return backend


def byte_tokenizer(**special):
    return Tokenizer(byte_backend(), {"bos_token": "<s>", "eos_token": "</s>", **special}, None, "bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The golden model with a tokenizer, a ChatML template and room for 160 tokens."""
    path = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(CASE, path)
    byte_backend().save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": BUILT_IN["chatml"]}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 160}))
    return path


@pytest.fixture(scope="module")
def llm(folder, device, kernels):
    checkpoint = open_checkpoint(folder)
    return LoadedModel(device, checkpoint, read_adapter(CASE / "adapter_init", checkpoint.config), kernels=kernels)


@pytest.fixture
def run(llm, folder, monkeypatch, capsys):
    """Runs the command on a model that is loaded already: (exit code, stdout, stderr)."""
    monkeypatch.setattr(command, "load", lambda *what: llm)

    def call(*args, adapter=True, typed=None):
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        options = ["--adapter", str(CASE / "adapter_init")] if adapter else []
        code = command.main(["--model", str(folder), *options, *args])
        return (code, *capsys.readouterr())

    return call


# The Python interface


def test_load_is_found_without_wgpu():
    script = "import sys, lorawgpu; assert 'wgpu' not in sys.modules; lorawgpu.load; assert 'wgpu' in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        lorawgpu.lode  # noqa: B018


def test_load_opens_what_it_is_given(folder, device):
    llm = lorawgpu.load(folder, CASE / "adapter_init", device)
    assert llm.device is device and llm.layout.size == llm.buffers.params.size
    with pytest.raises(UserError, match="no such file or folder"):
        lorawgpu.load(folder / "missing.gguf", device=device)


def test_logits_and_loss_are_the_golden_ones(llm):
    arrays, expected = np.load(CASE / "batch.npz"), np.load(CASE / "expected.npz")
    records = []
    for row, (ids, labels, mask) in enumerate(
        zip(arrays["input_ids"], arrays["labels"], arrays["attention_mask"].astype(bool), strict=True)
    ):
        got, want = llm.logits(ids[mask]), expected["logits"][row][mask]
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-4  # the golden cases' tolerance
        records.append({"input_ids": ids[mask].tolist(), "labels": labels[mask].tolist()})
    assert abs(llm.loss(records) - float(expected["loss"])) < 1e-4


def test_loss_of_text_and_of_conversations(llm):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert np.isfinite(llm.loss(["some text", {"messages": turns}]))
    with pytest.raises(UserError, match="records, line 2"):
        llm.loss(["fine", {"input_ids": [1, 2], "labels": [-100, -100]}])
    with pytest.raises(UserError, match="got no record"):
        llm.loss([])


def test_a_list_is_answered_as_its_prompts_are(llm, monkeypatch):
    monkeypatch.setattr(api, "MAX_ROWS", 2)
    sampling = Sampling(temperature=1.0, seed=2)
    prompts = [f"number {i}" * (1 + i % 3) for i in range(3)]  # more than are decoded at once
    several = llm.generate(prompts, max_new_tokens=6, sampling=sampling)
    assert len(several) == 3 and len(set(several)) > 1
    assert several[0] == llm.generate(prompts[0], max_new_tokens=6, sampling=sampling)
    assert llm.generate([{"role": "user", "content": prompts[0]}], max_new_tokens=6, sampling=sampling) == several[0]
    assert several == llm.generate(prompts, max_new_tokens=6, sampling=sampling)


def test_the_adapter_changes_the_answer(llm):
    with_adapter = llm.generate("hello", max_new_tokens=12, raw=True)
    assert with_adapter != llm.generate("hello", max_new_tokens=12, raw=True, use_adapter=False)
    assert with_adapter == "".join(llm.stream("hello", max_new_tokens=12, raw=True))


def test_the_context_is_the_models(llm):
    ended = Ended()
    list(llm.stream("x" * 150, raw=True, ended=ended))
    assert ended.reason == "context"
    with pytest.raises(UserError, match="prompt has 161 tokens, the model's context is 160"):
        llm.generate("x" * 161, raw=True)
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.generate("", raw=True)
    with pytest.raises(UserError, match="top_p is 2"):
        llm.generate("x", sampling=Sampling(top_p=2))


# Text


def test_pieces_are_whole_characters():
    tokenizer = byte_tokenizer()
    text = "naïve 🦙 €"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == text and not any("\ufffd" in p for p in pieces) and stream.finish() == ""
    cut = TextStream(tokenizer)
    assert [cut.push(i) for i in tokenizer.encode("€")[:2]] == ["", ""] and "\ufffd" in cut.finish()
    strip = TextStream(tokenizer, strip=True)
    assert "".join(strip.push(i) for i in tokenizer.encode("  a b")) == " a b"


def test_a_control_token_shows_nothing():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    ids = [*tokenizer.encode("a"), tokenizer.token_id("<|im_end|>"), *tokenizer.encode("b")]
    assert [stream.push(i) for i in ids] == ["a", "", "b"]


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("bitnet", "<|eot_id|>"), ("mistral", "</s>"), ("alpaca", "</s>")]
)
def test_an_answer_ends_where_the_template_closes_a_turn(name, end):
    tokenizer = byte_tokenizer()
    prompts = Prompts(tokenizer, ChatTemplate(BUILT_IN[name], tokenizer.special_tokens))
    assert prompts.turn_end() == tokenizer.token_id(end)
    assert prompts.stop_ids([7]) == {7, tokenizer.token_id("</s>"), tokenizer.token_id(end)}


def test_the_blank_of_a_generation_prompt_is_the_answers():
    tokenizer = byte_tokenizer()
    prompts = Prompts(tokenizer, ChatTemplate(BUILT_IN["bitnet"], tokenizer.special_tokens))
    assert tokenizer.decode(prompts.chat([{"role": "user", "content": "hi"}])).endswith("Assistant:")


def test_the_template_of_the_run_comes_before_the_models(tmp_path):
    tokenizer = byte_tokenizer()
    run, adapter = tmp_path / "run", tmp_path / "run" / "checkpoint-3"
    adapter.mkdir(parents=True)
    assert template_for(tokenizer) is None and template_for(tokenizer, adapter) is None
    config = {"base_model": str(CASE), "datasets": [{"path": str(CASE)}], "chat_template": "chatml", "max_steps": 1}
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"output_dir": str(run)}))
    assert template_for(tokenizer, adapter).source == template_for(tokenizer, run).source == BUILT_IN["chatml"]
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert template_for(tokenizer, adapter).source == "{{ messages[0].content }}"
    assert template_for(tokenizer, adapter, "bitnet").source == BUILT_IN["bitnet"]
    with pytest.raises(UserError, match="^chat template chatlm: neither a template, nor a file .* nor a built-in one"):
        template_for(tokenizer, given="chatlm")  # said of --chat-template as of the config's keys


def test_without_a_template_there_is_no_chat():
    with pytest.raises(UserError, match="no chat template: ask with --raw"):
        Prompts(byte_tokenizer(), None).chat([{"role": "user", "content": "hi"}])


# The command


def test_only_the_text_is_on_stdout(run, llm):
    code, out, err = run("--prompt", "hello", "--max-new-tokens", "5")
    assert code == 0 and out == llm.generate("hello", max_new_tokens=5) + "\n"
    assert err == "(cut: --max-new-tokens reached)\n"
    _, raw, _ = run("--prompt", "hello", "--max-new-tokens", "5", "--raw")
    assert raw == llm.generate("hello", max_new_tokens=5, raw=True) + "\n"


def test_a_seed_gives_its_text(run):
    texts = [run("--prompt", "a", "--max-new-tokens", "9", "--temperature", "1.5", "--seed", s)[1] for s in "113"]
    assert texts[0] == texts[1] != texts[2]


def test_a_file_of_prompts(run, llm, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\r\nzwölf\n".encode())
    _, out, _ = run("--prompts", str(path), "--max-new-tokens", "4", "--compare")
    first, second = map(json.loads, out.splitlines())
    assert [first["prompt"], second["prompt"]] == ["one", "zwölf"] and [first["line"], second["line"]] == [1, 3]
    assert list(first) == ["line", "prompt", "text", "cut", "base", "base_cut"]
    assert second["text"] == llm.generate("zwölf", max_new_tokens=4)
    assert second["base"] == llm.generate("zwölf", max_new_tokens=4, use_adapter=False)


def test_an_answer_of_a_file_says_that_it_was_cut(run, llm, tmp_path, monkeypatch):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n")
    assert json.loads(run("--prompts", str(path), "--max-new-tokens", "1")[1])["cut"] is True
    first = llm.logits(llm.encode("one"))[-1].argmax()
    monkeypatch.setattr(llm.prompts, "stop_ids", lambda ids: frozenset({int(first)}))
    answer = json.loads(run("--prompts", str(path), "--max-new-tokens", "1")[1])
    assert answer == {"line": 1, "prompt": "one", "text": "", "cut": False}


def test_an_adapter_of_another_model_is_noted(run, tmp_path, monkeypatch, llm):
    adapter = shutil.copytree(CASE / "adapter_init", tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/Llama-1B"}))
    asked = ("--adapter", str(adapter), "--prompt", "a", "--max-new-tokens", "1")
    for name, noted in (("a/Llama-2B", True), ("x/llama-1b-Q4_K_M.gguf", False)):
        monkeypatch.setattr(llm.checkpoint, "name", name)
        code, _, err = run(*asked, adapter=False)
        assert code == 0 and (f"note: the adapter {adapter} was made for 'org/Llama-1B'; the model" in err) is noted


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct/", "smollm2-135m-instruct"),
        ("C:\\models\\SmolLM2-135M-Instruct.Q8_0.gguf", "smollm2-135m-instruct"),
        ("bitnet-b1.58-2B-4T-bf16", "bitnet-b1.58-2b-4t"),
        ("unsloth/Llama-3.2-1B-unsloth-bnb-4bit", "llama-3.2-1b"),
        ("/c/models--org--Name/snapshots/" + "0" * 40, "name"),
        ("big-IQ3_XXS-00001-of-00002.gguf", "big"),
        ("ggml-model-i2_s.gguf", ""),
        ("", ""),
    ],
)
def test_names_of_one_model(name, plain):
    assert plain_name(name) == plain


def test_compare_shows_both(run, llm):
    _, out, _ = run("--prompt", "hello", "--max-new-tokens", "4", "--compare", "--system", "be kind")
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    base, tuned = (llm.generate(turns, max_new_tokens=4, use_adapter=use) for use in (False, True))
    assert out == f"--- without the adapter ---\n{base}\n--- with the adapter ---\n{tuned}\n"


def test_compare_says_which_answer_was_cut(run, llm, monkeypatch):
    reasons = {}

    def stream(prompt, *, use_adapter, ended, **_):
        ended.reason = reasons[use_adapter]
        yield "answer"

    monkeypatch.setattr(llm, "stream", stream)
    for base, tuned, said in (
        ("length", "stop", ["(cut without the adapter: --max-new-tokens reached)"]),
        ("stop", "context", ["(cut with the adapter: the model's context reached)"]),
        ("stop", "stop", []),
    ):
        reasons |= {False: base, True: tuned}
        assert run("--prompt", "hello", "--compare")[2].splitlines() == said


def test_chat_remembers_resets_and_refuses_what_is_too_long(run, llm):
    code, out, err = run("--chat", "--max-new-tokens", "5", typed="hi\nand?\n/reset\nhi\n" + "x" * 150 + "\nhi\n")
    first = llm.generate("hi", max_new_tokens=5)
    turns = [("user", "hi"), ("assistant", first), ("user", "and?")]
    second = llm.generate([{"role": r, "content": c} for r, c in turns], max_new_tokens=5)
    assert code == 0 and out.startswith(f"{first}\n{second}\n{first}\n")
    assert "leaves less than --max-new-tokens 5 of the context of 160 tokens" in err


def test_a_pipe_is_read_to_its_end_and_a_terminal_to_an_empty_line(run, llm, monkeypatch):
    answer = llm.generate("hi", max_new_tokens=5)
    typed = "\nhi\n\n  \n/reset\nhi"
    code, out, err = run("--chat", "--max-new-tokens", "5", typed=typed)
    assert code == 0 and out == f"{answer}\n{answer}\n" and "> " not in err and command.CHAT_HELP not in err
    terminal = io.StringIO("hi\n\nhi\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    code, out, err = run("--chat", "--max-new-tokens", "5")
    assert code == 0 and out == f"{answer}\n" and err.startswith(f"{command.CHAT_HELP}\n> ")


def test_chat_compares_and_remembers_the_adapters_answer(run, llm):
    _, out, _ = run("--chat", "--compare", "--max-new-tokens", "5", typed="hi\nand?\n")
    _, alone, _ = run("--chat", "--max-new-tokens", "5", typed="hi\nand?\n")
    sides = out.split("--- without the adapter ---\n")[1:]
    assert len(sides) == 2 and "".join(s.partition("--- with the adapter ---\n")[2] for s in sides) == alone


def test_a_turn_that_is_no_utf8_is_refused_and_the_conversation_goes_on(run, llm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nhi\n"), "utf-8"))
    code, out, err = run("--chat", "--max-new-tokens", "5")
    assert code == 0 and out == llm.generate("hi", max_new_tokens=5) + "\n" and "is not UTF-8" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "one of the arguments --prompt --prompts --chat is required"),
        (("--prompt", "a", "--max-new-tokens", "0"), "--max-new-tokens 0: wanted at least 1"),
        (("--prompt", "a", "--top-p", "0"), "top_p is 0.0; wanted a value above 0 and at most 1"),
        (("--prompt", "a", "--top-k", "99999999999"), "top_k is 99999999999; wanted a value from 0 (all"),
        (("--prompt", "a", "--temperature", "1e-50"), "temperature is 1e-50; wanted a value from 1e-06 to 100, or 0"),
        (("--prompt", "a", "--repetition-penalty", "1e-50"), "repetition_penalty is 1e-50; wanted a value from 1e-06"),
        (("--prompt", "a", "--top-k", "x"), "argument --top-k: invalid int value: 'x'"),
        (("--chat", "--raw"), "--raw has no turns"),
        (("--prompts", "/nowhere/at/all"), "/nowhere/at/all: No such file or directory"),
    ],
)
def test_wrong_input_is_one_message(run, args, message):
    code, out, err = run(*args)
    assert code == 2 and out == "" and err.startswith("error: ") and message in err


def test_compare_wants_an_adapter(run):
    code, _, err = run("--prompt", "a", "--compare", adapter=False)
    assert code == 2 and "give one with --adapter" in err


def test_prompt_files_that_are_none(run, tmp_path):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    assert "holds no prompt" in run("--prompts", str(tmp_path / "blank"))[2]
    assert "not UTF-8 (byte 4)" in run("--prompts", str(tmp_path / "latin"))[2]
