"""The `generate` command on a loaded model: what it prints, and where."""

import io
import json
import shutil
import sys

import pytest
from byte_model import CASE

from lorawgpu.generate import __main__ as command
from lorawgpu.lora.base_name import plain_name


@pytest.fixture
def run(llm, llm_folder, monkeypatch, capsys):
    """Runs the command on a loaded model: (exit code, stdout, stderr)."""
    monkeypatch.setattr(command, "load", lambda *what: llm)

    def call(*args, adapter=True, typed=None):
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        options = ["--adapter", str(CASE / "adapter_init")] if adapter else []
        code = command.main(["--model", str(llm_folder), *options, *args])
        return (code, *capsys.readouterr())

    return call


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


def test_a_file_of_records_is_read_as_records(run, llm, tmp_path):
    """Not as text of JSON, whatever the file is called: by its name, or because each line is an object."""
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    records = [{"messages": chat}, {"prompt": "zwölf"}, {"text": "three", "id": 7}, {"prompt": chat[:1]}]
    content = "\n".join(map(json.dumps, records))
    for name in ("prompts.jsonl", "prompts.txt"):
        (tmp_path / name).write_text(content)
        _, out, _ = run("--prompts", str(tmp_path / name), "--max-new-tokens", "4")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["prompt"] for row in rows] == [chat[:1], "zwölf", "three", chat[:1]]  # without the chat's answer
        assert [row["line"] for row in rows] == [1, 2, 3, 4]
        assert [row["text"] for row in rows] == [
            llm.generate(p, max_new_tokens=4) for p in ("one", "zwölf", "three", "one")
        ]
    (tmp_path / "table.csv").write_text("id,prompt\n1,one\n")
    assert json.loads(run("--prompts", str(tmp_path / "table.csv"), "--max-new-tokens", "4")[1])["prompt"] == "one"
    (tmp_path / "code.txt").write_text('{"a": 1\nx = {}\n')  # not all lines are objects: text
    _, out, _ = run("--prompts", str(tmp_path / "code.txt"), "--max-new-tokens", "1")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ['{"a": 1', "x = {}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a"}', "line 2: no prompt in the keys `question`; wanted `messages`, `prompt` or `text`"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2: `messages` has only answers"),
        ('{"messages": "a"}', "line 2: `messages` must be a list of messages, got str"),
        ('{"prompt": ""}', "line 2: `prompt` must be a string that is not empty, got str"),
        ('{"messages": [{"role": "boss", "content": "a"}]}', "line 2: messages[0]: `role` must be one of"),
        ('"a"', "line 2: wanted a JSON object, got str"),
        ("a", "line 2: not valid JSON"),
    ],
)
def test_a_record_without_a_prompt_is_refused(run, tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n' + line + "\n")
    code, out, err = run("--prompts", str(tmp_path / "p.jsonl"))
    assert code == 2 and out == "" and f"p.jsonl, {message}" in err


def test_raw_text_has_no_conversations(run, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "p.jsonl, line 1: a conversation, which --raw" in run("--prompts", str(tmp_path / "p.jsonl"), "--raw")[2]


def test_the_base_is_taken_from_the_adapter(llm_folder, llm, tmp_path, capsys, monkeypatch):
    adapter = shutil.copytree(CASE / "adapter_init", tmp_path / "adapter")
    keys = json.loads((adapter / "adapter_config.json").read_text())
    seen = []
    monkeypatch.setattr(command, "load", lambda model, *rest: (seen.append(model), llm)[1])
    for base in (str(llm_folder), None):
        (adapter / "adapter_config.json").write_text(json.dumps(keys | {"base_model_name_or_path": base}))
        code = command.main(["--adapter", str(adapter), "--prompt", "a", "--max-new-tokens", "2"])
        out, err = capsys.readouterr()
        assert (code, seen) == ((0 if base else 2), [str(llm_folder)])
    assert f"{adapter}: names no base model; pass it with --model" in err


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
    args = ("--adapter", str(adapter), "--prompt", "a", "--max-new-tokens", "1")
    for name, noted in (("a/Llama-2B", True), ("x/llama-1b-Q4_K_M.gguf", False)):
        monkeypatch.setattr(llm.checkpoint, "name", name)
        code, _, err = run(*args, adapter=False)
        assert code == 0 and (f"note: the adapter {adapter} was trained on 'org/Llama-1B'" in err) is noted


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
    for base, tuned, notes in (
        ("length", "stop", ["(cut without the adapter: --max-new-tokens reached)"]),
        ("stop", "context", ["(cut with the adapter: the model's context reached)"]),
        ("stop", "stop", []),
    ):
        reasons |= {False: base, True: tuned}
        assert run("--prompt", "hello", "--compare")[2].splitlines() == notes


def test_chat_remembers_resets_and_refuses_what_is_too_long(run, llm):
    code, out, err = run("--chat", "--max-new-tokens", "5", typed="hi\nand?\n/reset\nhi\n" + "x" * 150 + "\nhi\n")
    first = llm.generate("hi", max_new_tokens=5)
    turns = [("user", "hi"), ("assistant", first), ("user", "and?")]
    second = llm.generate([{"role": r, "content": c} for r, c in turns], max_new_tokens=5)
    assert code == 0 and out.startswith(f"{first}\n{second}\n{first}\n")
    assert "this turn has" in err and "leaves fewer than 5 of the context of 160 for an answer: shorten it" in err


def test_a_long_answer_leaves_room_for_the_next_turn(run, llm):
    """--max-new-tokens beyond the context refuses no turn; an answer ends with the context, and a note says so."""
    code, out, err = run("--chat", "--max-new-tokens", "600", typed="hi\nand?\n/reset\nhi\n")
    first = llm.generate("hi", max_new_tokens=600)
    assert code == 0 and out == f"{first}\n{first}\n"
    assert err.count("(cut: the model's context reached)") == 2
    assert "leaves fewer than 20 tokens of the context of 160 for an answer: /reset starts a new one" in err


def test_chat_without_a_stdin_is_one_message(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, out, err = run("--chat")
    assert code == 2 and out == "" and "--chat reads its turns from stdin, which is closed" in err


def test_an_answer_is_out_before_the_note_on_it(run, monkeypatch):
    """Both may go to one file, and stdout is buffered if it is not a terminal."""
    both = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(both, "utf-8", write_through=name == "stderr"))
    run("--prompt", "hello", "--max-new-tokens", "2")
    assert both.getvalue().endswith(b"\n(cut: --max-new-tokens reached)\n")


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


def test_a_turn_that_is_not_utf8_is_refused_and_the_conversation_goes_on(run, llm, monkeypatch):
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
    assert code == 2 and "pass one with --adapter" in err


def test_bad_prompt_files(run, tmp_path):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    assert "holds no prompt" in run("--prompts", str(tmp_path / "blank"))[2]
    assert "not UTF-8 at byte 4" in run("--prompts", str(tmp_path / "latin"))[2]
