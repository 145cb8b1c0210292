"""Arguments of a chat template: from the config into training, previews, prompts and exports."""

import json

import pytest
import yaml
from byte_model import byte_tokenizer
from chats import turns
from tiny_tokenizer import tiny_tokenizer

from lorawgpu import cli
from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import resolve_template
from lorawgpu.config.schema import TrainConfig
from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import Prompts, template_choice, template_for
from lorawgpu.train.setup import text_setup

SWITCH = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ '(' ~ note | default('') ~ ')' }}{% endif %}"
)


def prompt(template):
    return template.render(turns("Hi"), add_generation_prompt=True)


def config(**keys):
    return TrainConfig(base_model="m", datasets=[{"path": "d"}], **keys)


def test_they_are_variables_of_the_template():
    values = {"enable_thinking": False, "note": 'é😀 "%}\n\\ {{ x }}'}
    template = resolve_template(None, SWITCH, None, {}, values)
    assert prompt(template) == f"[user]Hi[assistant]<think></think>({values['note']})"
    assert prompt(resolve_template(None, SWITCH, None, {}, {"note": 1e-05})) == "[user]Hi[assistant](1e-05)"
    assert prompt(resolve_template(None, SWITCH, None, {}, {})) == "[user]Hi[assistant]()"


STARTS = ["", "\n", "\n\n  ", "  {% if true %}x{% endif %}\n", "{%- if true %}\n  y{% endif %}"]


@pytest.mark.parametrize("start", STARTS)
def test_they_change_no_white_space(start):
    source = start + SWITCH
    assert prompt(resolve_template(None, source, None, {}, {"enable_thinking": True})) == prompt(
        resolve_template(None, source, None, {})
    )


def test_a_template_with_arguments_is_whole_and_later_ones_come_first():
    kept = resolve_template(None, SWITCH, None, {}, {"enable_thinking": False}).source
    assert prompt(resolve_template(None, kept, None, {})) == "[user]Hi[assistant]<think></think>()"
    assert prompt(resolve_template(None, kept, None, {}, {"enable_thinking": True})) == "[user]Hi[assistant]()"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinkin": True}, "does not read a variable `enable_thinkin`; the nearest one is `enable_thinking`"),
        ({"color": 1}, "does not read a variable `color`; it reads enable_thinking, note"),
        ({"strftime_now": 1}, "does not read a variable `strftime_now`"),
    ],
)
def test_an_argument_that_nothing_reads(arguments, message):
    with pytest.raises(UserError, match=message):
        resolve_template(None, SWITCH, None, {}, arguments)
    with pytest.raises(UserError, match="it reads none"):
        resolve_template("chatml", None, None, {}, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": "x"}, "messages is set by the program"),
        ({"a b": 1}, "'a b' is not the name of a variable"),
        ({"a": [1]}, "a string, a number, true or false for a"),
        ({"a": float("inf")}, "a string, a number, true or false for a"),
        ([1], "names and values"),
    ],
)
def test_arguments_that_no_template_can_have(arguments, message):
    with pytest.raises(UserError, match=message):
        template_choice(None, None, arguments)
    with pytest.raises(ValueError):
        config(chat_template_kwargs=arguments)


def test_training_and_generation_use_those_of_the_config(tmp_path):
    wanted = "[user]Hi[assistant]<think></think>()"
    keys = {"chat_template_jinja": SWITCH, "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(text_setup(config(**keys), tiny_tokenizer, 420).template) == wanted
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "config.yaml").write_text(config(**keys).dump_yaml())
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        assert prompt(template_for(byte_tokenizer(), folder)) == wanted
        assert prompt(template_for(byte_tokenizer(), folder, arguments={"note": "n"})) == wanted.replace("()", "(n)")
    assert "<think>" not in prompt(template_for(byte_tokenizer(), tmp_path, arguments={"enable_thinking": True}))
    assert template_for(byte_tokenizer(), tmp_path, "chatml").source == BUILT_IN["chatml"]  # whose run had none
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"chat_template": "chatml", "chat_template_kwargs": [1]}))
    with pytest.raises(UserError, match="wanted names and values"):
        template_for(byte_tokenizer(), tmp_path)


def test_a_prompt_with_the_switch():
    template = resolve_template(None, SWITCH, None, {}, {"enable_thinking": False})
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(Prompts(tokenizer, template).encode("Hi")) == prompt(template)


def test_the_preview_shows_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LORAWGPU_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer_folder(tmp_path / "m")
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns("Hi", "Yes")}))
    keys = {"base_model": str(tmp_path / "m"), "datasets": [{"path": str(tmp_path / "d.jsonl")}],
            "chat_template_jinja": SWITCH}  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(keys))
    switch = "chat_template_kwargs={enable_thinking: false}"
    assert cli.main(["train", str(tmp_path / "c.yaml"), "--preview", "1", "--set", switch]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'chat_template_kwargs: {"enable_thinking": false}'
    assert lines[1].startswith("note: a last answer follows '' in training, but '<think></think>()' in generation")
    assert "[user]Hi[assistant]⟦Yes⟧" in lines[3]


def tiny_tokenizer_folder(folder):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
