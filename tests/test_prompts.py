"""Between text and ids: pieces of an answer, its end, and the choice of a chat template."""

import pytest
import yaml
from byte_model import CASE, byte_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate
from lorawgpu.errors import UserError
from lorawgpu.generate.prompts import Prompts, TextStream, template_for


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


def test_the_space_after_a_generation_prompt_belongs_to_the_answer():
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
    moved = {"datasets": [{"path": "/gone.jsonl"}], "key_of_another_version": 1, "chat_template": "chatml"}
    (run / "config.yaml").write_text(yaml.safe_dump(moved))  # only the template is read
    assert template_for(tokenizer, adapter).source == BUILT_IN["chatml"]
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert template_for(tokenizer, adapter).source == "{{ messages[0].content }}"
    assert template_for(tokenizer, adapter, "bitnet").source == BUILT_IN["bitnet"]
    with pytest.raises(
        UserError, match="^chat template chatlm: not a readable file .*, and neither Jinja source nor a built-in"
    ):
        template_for(tokenizer, given="chatlm")  # the same message for --chat-template as for the config's keys


def test_without_a_template_there_is_no_chat():
    with pytest.raises(UserError, match="no chat template: use --raw"):
        Prompts(byte_tokenizer(), None).chat([{"role": "user", "content": "hi"}])
