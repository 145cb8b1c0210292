"""The families' chat templates: rendering, loss masks, reasoning switches, and the tokens that end an answer."""

import json
from datetime import datetime
from functools import cache

import jinja2
import pytest
from chats import target_runs, turns
from family_templates import FAMILIES, tokenizer_of

from lorawgpu.chat.prompt_check import prompt_note
from lorawgpu.chat.template import ChatTemplate, TemplateFailed, resolve_template
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.generate.prompts import Prompts

NOW = datetime(2024, 7, 26)
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "<think>\nhm\n</think>\n\n"
SWITCHES = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
CASES = [(name, switch) for name, family in FAMILIES.items() for switch in SWITCHES
         if not switch or "enable_thinking" in family.source]  # fmt: skip
# What a template shows of "\n answer \n" next to its own text; the first and the last of several answers may differ.
CONVERSATIONS = [
    turns("Hi", "Yes"),
    turns("Hi", "Yes", "And", "42."),
    turns("Hi", "Yes", "And", "Yes", "Yes", "Yes"),
    turns("Hi <|im_end|>", "naïve <s> café", "<|user|>", "1\n\n2"),
    [*turns("Hi", "Yes"), {"role": "user", "content": "a question without an answer"}],
]


def family_template(name, switch):
    return _family_template(name, tuple(switch.items()))


@cache
def _family_template(name, switch):
    tokenizer = tokenizer_of(name)
    template = resolve_template(None, FAMILIES[name].source, None, tokenizer.special_tokens, dict(switch))
    return tokenizer, ChatTemplate(template.source, template.special_tokens, NOW)


def runs(name, messages, switch=None):
    """The text of the targets."""
    tokenizer, template = family_template(name, switch or {})
    encoder = Encoder("chat", EncodeSettings(9999, "raise", False, ("assistant",)), tokenizer, template)
    encoded = encoder("f", 1, json.dumps({"messages": messages}).encode())
    assert not encoded.missing_eos
    return target_runs(tokenizer, encoded.sample)


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_exactly_the_answers_and_their_ends_are_trained(name, switch):
    family = FAMILIES[name]
    space = " " if name == "mistral-v1" else ""  # " Yes" contains the first character of the answer
    for messages in CONVERSATIONS:
        wanted = [m["content"] + family.end for m in messages if m["role"] == "assistant"]
        for start in ([], [SYSTEM]) if family.takes_system else ([],):
            assert [run.removeprefix(space) for run in runs(name, start + messages, switch)] == wanted


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_rendering_equals_plain_jinja(name, switch):
    family, (tokenizer, template) = FAMILIES[name], family_template(name, switch)
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.globals |= {"strftime_now": NOW.strftime}
    source = family.source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for messages in CONVERSATIONS:
        for start in ([], [SYSTEM]) if family.takes_system else ([],):
            for prompted in (False, True):
                wanted = plain.from_string(source).render(
                    messages=start + messages, add_generation_prompt=prompted, **tokenizer.special_tokens, **switch
                )
                if "{% generation %}" not in family.source:
                    assert template.render(start + messages, None, prompted) == wanted
                else:  # without the tags, their white space goes
                    assert template.render(start + messages, None, prompted).split() == wanted.split()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ends_an_answer(name):
    tokenizer, template = family_template(name, {})
    end = tokenizer.token_id(FAMILIES[name].end)
    prompts = Prompts(tokenizer, template)
    assert end is not None and prompts.turn_end() == end
    assert prompts.stop_ids([]) == {end, tokenizer.eos_id}


def test_gemmas_without_a_system_role():
    with pytest.raises(BadLine, match="line 1: the chat template rejected the conversation: System role not supported"):
        runs("gemma2", [SYSTEM, *turns("Hi", "Yes")])
    _, template = family_template("gemma3", {})
    assert "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>" in template.render([SYSTEM, *turns("Hi")])
    with pytest.raises(TemplateFailed, match="must alternate"):
        template.render(turns("Hi", "And", roles=("user",)))


def thinking(*contents):
    """A conversation whose answers have reasoning, in a key of its own."""
    return [m | ({"reasoning_content": "hm"} if m["role"] == "assistant" else {}) for m in turns(*contents)]


def test_qwen3_drops_the_reasoning_of_earlier_turns():
    inline = turns("Hi", THOUGHT + "Yes", "And", THOUGHT + "42.")
    for messages in (inline, thinking("Hi", "Yes", "And", "42.")):
        assert runs("qwen3", messages) == ["Yes<|im_end|>", THOUGHT + "42.<|im_end|>"]
    first = [*thinking("Hi", "Yes"), *turns("And", "42.")]
    assert runs("qwen3", first) == ["Yes<|im_end|>", "42.<|im_end|>"]
    assert runs("qwen3", first, {"enable_thinking": False}) == ["Yes<|im_end|>", "42.<|im_end|>"]


@pytest.mark.parametrize("messages", [thinking("Hi", "Yes"), turns("Hi", THOUGHT + "Yes")])
def test_reasoning_while_thinking_is_switched_off(messages):
    """The generation prompt has an empty block: an answer with another one does not continue it."""
    assert runs("qwen3", messages) == [THOUGHT + "Yes<|im_end|>"]
    with pytest.raises(BadLine, match=r"remove its reasoning, or switch thinking on \(chat_template_kwargs\)"):
        runs("qwen3", messages, {"enable_thinking": False})


def test_gemma4_and_smollm3_with_reasoning():
    channel = "<|channel>thought\nhm<channel|>"
    assert runs("gemma4", turns("Hi", channel + "Yes", "And", channel + "42.")) == ["Yes<turn|>", "42.<turn|>"]
    assert runs("smollm3", turns("Hi", THOUGHT + "Yes")) == [THOUGHT + "Yes<|im_end|>"]
    off = [{"role": "system", "content": "Be brief. /no_think"}, *turns("Hi", "Yes")]
    _, template = family_template("smollm3", {})
    assert "26 July 2024\nReasoning Mode: /no_think\n\n## Custom Instructions\n\nBe brief.\n" in template.render(off)
    assert runs("smollm3", off) == ["Yes<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("qwen3", "assistant\n", "assistant\n<think>\n\n</think>\n\n"),
        ("gemma4", "<|turn>model\n", "<|turn>model\n<|channel>thought\n<channel|>"),
        ("smollm3", "assistant\n", "assistant\n<think>\n\n</think>\n"),
    ],
)
def test_the_generation_prompt_has_the_switch(name, on, off):
    for value, wanted in ((True, on), (False, off)):
        _, template = family_template(name, {"enable_thinking": value})
        assert template.render(turns("Hi"), add_generation_prompt=True).endswith(wanted)


def test_a_note_if_training_and_generation_start_an_answer_differently():
    notes = {(name, *switch.values()) for name, switch in CASES if prompt_note(family_template(name, switch)[1])}
    assert notes == {("qwen3",), ("qwen3", True), ("gemma4",), ("gemma4", False)}
    note = prompt_note(family_template("qwen3", {})[1])
    assert r"follows '<think>\n\n</think>\n\n' in training, but '' in generation" in note
    assert "set enable_thinking in chat_template_kwargs" in note


def test_white_space_that_a_control_token_takes_is_not_trained():
    """Phi-3's `<|assistant|>` contains the newlines after it, so also those that an answer begins with."""
    assert runs("phi3", turns("Hi", "\n Yes \n", "And", " 42.")) == ["Yes \n<|end|>", "42.<|end|>"]


@pytest.mark.reference
@pytest.mark.parametrize(("name", "switch"), CASES)
def test_rendering_equals_transformers(name, switch):
    transformers = pytest.importorskip("transformers")
    tokenizer, template = family_template(name, switch)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, **tokenizer.special_tokens)
    template = ChatTemplate(template.source, template.special_tokens)  # transformers shows today's date
    for messages in [*CONVERSATIONS, thinking("Hi", "Yes", "And", "42.")]:
        for start in ([], [SYSTEM]) if FAMILIES[name].takes_system else ([],):
            for prompted in (False, True):
                wanted = theirs.apply_chat_template(
                    start + messages,
                    chat_template=FAMILIES[name].source,
                    tokenize=False,
                    add_generation_prompt=prompted,
                    **switch,
                )
                assert template.render(start + messages, None, prompted) == wanted
