"""`export --to ollama`: the TEMPLATE of a Modelfile says what the chat template says, judged by Go's own language."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_export_gguf_merged import with_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.errors import UserError
from lorawgpu.export import __main__ as command
from lorawgpu.export.modelfile import CONVERSATIONS, pieces_of

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Published templates of further forms, by what they do, written anew.
FORMS = {
    "phi": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n",
    "default system": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    ),
    "no thinking": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    ),
    "refuses system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "<start_of_turn>model\n"
    ),
    "quotes and braces": "{% for m in messages %}{{ '\"{{' }}{{ m.role }}\\{{ m.content }}{{ '}}\"' }}\n{% endfor %}>>",
}
TEMPLATES = {name: source for name, source in (BUILT_IN | FORMS).items()}
PROGRAM = """package main
import ("encoding/json"; "os"; "text/template")
type message struct { Role, Content string }
type job struct { Template string; Messages []message }
func main() {
	var jobs []job
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil { panic(err) }
	out := json.NewEncoder(os.Stdout)
	for _, j := range jobs {
		var text writer
		if err := template.Must(template.New("").Parse(j.Template)).Execute(&text, j); err != nil { panic(err) }
		out.Encode(string(text))
	}
}
type writer []byte
func (w *writer) Write(b []byte) (int, error) { *w = append(*w, b...); return len(b), nil }
"""


def conversations(name: str) -> list[list[dict]]:
    return [c for c in CONVERSATIONS if name != "refuses system" or c[0]["role"] != "system"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_render_what_jinja_renders(name):
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    pieces = pieces_of(template, "<s>")
    assert len(CONVERSATIONS) == 20
    for messages in conversations(name):
        assert pieces.render(messages) == template.render(messages, add_generation_prompt=True).removeprefix("<s>")


@pytest.mark.long
def test_go_renders_what_jinja_renders(tmp_path):
    """All templates on all conversations, by Go's text/template."""
    go = shutil.which("go")
    if go is None:
        assert not os.environ.get("CI"), "no go (Debian: apt-get install golang-go)"
        pytest.skip("no go (Debian: apt-get install golang-go)")
    (tmp_path / "main.go").write_text(PROGRAM)
    jobs, wanted = [], []
    for name, source in TEMPLATES.items():
        template = ChatTemplate(source, SPECIAL)
        text = pieces_of(template, "<s>").go()
        for messages in conversations(name):
            turns = [{"Role": m["role"], "Content": m["content"]} for m in messages]
            jobs.append({"Template": text, "Messages": turns})
            wanted.append(template.render(messages, add_generation_prompt=True).removeprefix("<s>"))
    env = os.environ | {"GOCACHE": str(tmp_path / "cache"), "GO111MODULE": "off", "GOFLAGS": ""}
    done = subprocess.run([go, "run", "main.go"], cwd=tmp_path, env=env, input=json.dumps(jobs), text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted and len(wanted) > 200


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show every message of a user"),
        ("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}", "it shows the date"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}.", "in a conversation of"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}.", "depends on the turns between"),
    ],
)
def test_a_template_that_does_more_is_named(source, words):
    with pytest.raises(UserError, match=words):
        pieces_of(ChatTemplate(source, SPECIAL), None)


def read(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def test_a_folder_becomes_a_merged_file_with_a_modelfile(tmp_path, capsys):
    base = with_tokenizer("llama_dense", tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
    (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    args = ["--adapter", str(base / "adapter_init"), "--model", str(base), "--to", "ollama", "--system", "Be terse."]
    assert command.main([*args, "--out", str(tmp_path / "Mine")]) == 0
    out = capsys.readouterr().out
    lines = read(tmp_path / "Mine" / "Modelfile")
    assert (
        "wrote merged ollama" in out and lines[0] == "FROM ./model.gguf" and (tmp_path / "Mine" / "model.gguf").exists()
    )
    assert lines[1].startswith('TEMPLATE """{{- $start') and 'PARAMETER stop "</s>"' in lines
    assert lines[-1] == 'SYSTEM """Be terse."""' and not [line for line in lines if line.startswith("ADAPTER")]


def test_a_gguf_base_stays_where_it_is(tmp_path, capsys):
    case = Path(__file__).parent / "golden" / "llama_q8_0"
    args = ["--adapter", str(case / "adapter_init"), "--model", str(case / "model.gguf"), "--to", "ollama", "--out"]
    assert command.main([*args, str(tmp_path / "one")]) == 0
    lines = read(tmp_path / "one" / "Modelfile")
    assert lines[:2] == [f"FROM {(case / 'model.gguf').resolve()}", "ADAPTER ./adapter.gguf"]
    assert "the Modelfile has no TEMPLATE" in capsys.readouterr().out
    assert command.main([*args, str(tmp_path / "two"), "--merged"]) == 0
    assert read(tmp_path / "two" / "Modelfile")[0] == "FROM ./model.gguf"
