"""Tools and tool calls: what data sets hold, what templates want, and what is trained of it.

The right texts are by hand; `test_transformers_renders_the_same` computes them again with transformers.
"""

import json

import pyarrow
import pytest
from chats import encode, runs
from pyarrow import parquet
from test_chat_content import THINKING
from test_dataset import loading
from test_tokenizer import gguf_values, save_folder, trained
from tiny_tokenizer import tiny_tokenizer
from vocabularies import write_gguf

from lorawgpu.chat.builtin import CHATML
from lorawgpu.chat.template import ChatTemplate, resolve_template
from lorawgpu.data.dataset import DatasetSpec, tokenize
from lorawgpu.data.encode import Encoder, EncodeSettings
from lorawgpu.data.preview import summary
from lorawgpu.errors import UserError
from lorawgpu.tokenizer.hf import Tokenizer

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {
        "city": {"type": "string"}, "day": {"type": "string", "default": None}}}}}  # fmt: skip
HEAD = "{%- if tools %}{% for t in tools %}{{ '<tool>' + t | tojson + '</tool>\\n' }}{% endfor %}{% endif %}"
TURNS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Qwen2.5, Llama 3.1, SmolLM3; DeepSeek and older ones; Qwen3; GLM and Qwen3-Coder; Hermes prints the whole function
OBJECTS = HEAD + TURNS.replace("CALL", "{{ f.name + ' ' + f.arguments | tojson }}")
STRINGS = HEAD + TURNS.replace("CALL", "{{ f.name + ' ' + f.arguments }}")
EITHER = HEAD + TURNS.replace(
    "CALL",
    "{{ f.name + ' ' }}{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}",
)
ITEMS = HEAD + TURNS.replace(
    "CALL", "{{ f.name }}{% for k, v in f.arguments | items %}{{ ' ' + k + '=' + v }}{% endfor %}"
)
WHOLE = HEAD + TURNS.replace("CALL", "{{ f | tojson }}")
# Mistral 7B Instruct v0.3
MISTRAL = """\
{%- set loop_messages = messages[1:] if messages[0]["role"] == "system" else messages %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
SHOWN = {
    "objects": (OBJECTS, 'weather {"city": "Paris"}'),
    "strings": (STRINGS, 'weather {"city":"Paris"}'),
    "either": (EITHER, 'weather {"city":"Paris"}'),
    "items": (ITEMS, "weather city=Paris"),
    "whole": (WHOLE, '{"name": "weather", "arguments": {"city": "Paris"}}'),
}


def call(arguments='{"city":"Paris"}', **keys):
    return {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}} | keys


def conversation(*calls, content=None, more=()):
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls or [call()])},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "It is sunny."},
        *more,
    ]


# Arguments as JSON text


@pytest.mark.parametrize("name", SHOWN)
def test_arguments_are_what_the_template_wants(name):
    template, shown = SHOWN[name]
    assert runs(encode(template, conversation(), tools=[TOOL])) == [f"{shown}<|im_end|>", "It is sunny.<|im_end|>"]


@pytest.mark.parametrize("name", ["objects", "items", "whole"])
def test_an_object_and_its_text_are_the_same(name):
    template, _ = SHOWN[name]
    for empty in ("", "{}"):
        a, b = (encode(template, conversation(call(args))) for args in (empty, {}))
        assert a.input_ids.tolist() == b.input_ids.tolist()
    a, b = (encode(template, conversation(call(args))) for args in ('{"city": "Genève"}', {"city": "Genève"}))
    assert a.input_ids.tolist() == b.input_ids.tolist()


def test_arguments_that_are_not_json_are_refused_by_the_line():
    with pytest.raises(UserError, match=r"line 7: the arguments of tool_calls\[0\] \(weather\) are not JSON"):
        encode(OBJECTS, conversation(call("{'city': 'Paris'}")))
    assert "{'city'" in runs(encode(STRINGS, conversation(call("{'city': 'Paris'}"))))[0]


def test_generation_reads_them_too():
    template = ChatTemplate(OBJECTS, {})
    assert 'weather {"city": "Paris"}<|im_end|>' in template.render(conversation(), None, True)


def test_tools_and_parameters_may_be_text():
    text = TOOL | {"function": TOOL["function"] | {"parameters": json.dumps(TOOL["function"]["parameters"])}}
    want = encode(OBJECTS, conversation(), tools=[TOOL]).input_ids.tolist()
    for tools in ([text], json.dumps([TOOL]), [json.dumps(TOOL)]):
        assert encode(OBJECTS, conversation(), tools=tools).input_ids.tolist() == want


@pytest.mark.reference
@pytest.mark.parametrize("name", [*SHOWN, "mistral"])
def test_transformers_renders_the_same(name):
    """Of the arguments as they are for templates that take text, else of the object."""
    transformers = pytest.importorskip("transformers")
    ours = tiny_tokenizer()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours._backend, **ours.special_tokens)
    template = MISTRAL if name == "mistral" else SHOWN[name][0]
    arguments = '{"city":"Paris"}' if name in ("strings", "either") else {"city": "Paris"}
    want = theirs.apply_chat_template(
        conversation(call(arguments)), tools=[TOOL], chat_template=template, tokenize=False
    )
    rendered = ChatTemplate(template, ours.special_tokens).render(conversation(), [TOOL])
    assert rendered == want


# Nulls of tables


def padded(**keys):
    return call({"city": "Paris", "zone": None}, index=None) | keys


CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string"}}}}}  # fmt: skip


def test_parquet_pads_with_nulls_that_are_not_trained(tmp_path):
    clock = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
        {"role": "assistant", "content": "12"},
    ]  # fmt: skip
    records = [
        {"messages": conversation(call({"city": "Paris"})), "tools": [TOOL]},
        {"messages": clock, "tools": [CLOCK]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    as_table, as_lines = (
        tokenize(DatasetSpec(str(tmp_path / name)), loading(template=OBJECTS, sequence_len=2000))
        for name in ("d.parquet", "d.jsonl")
    )
    texts = [[tiny_tokenizer().decode(store[i].input_ids) for i in range(2)] for store in (as_table, as_lines)]
    assert [text.replace(', "default": null', "") for text in texts[1]] == texts[0]
    assert "null" not in texts[0][0] + texts[0][1] and 'clock {"zone": "UTC"}' in texts[0][1]


def test_nulls_that_a_table_left_in_jsonl():
    tools = [json.loads(json.dumps(TOOL)), CLOCK]
    tools[0]["function"]["parameters"]["properties"]["zone"] = None
    messages = conversation(padded())
    assert encode(OBJECTS, messages, tools=tools).input_ids.tolist() == \
        encode(OBJECTS, conversation(call({"city": "Paris"})), tools=[TOOL, CLOCK]).input_ids.tolist()  # fmt: skip


def test_a_null_that_the_tool_knows_is_an_argument():
    shown = runs(encode(OBJECTS, conversation(call({"city": None})), tools=[TOOL]))[0]
    assert shown == 'weather {"city": null}<|im_end|>'
    assert "null" in runs(encode(OBJECTS, conversation(call({"city": None}))))[0]  # no tool says anything


# The template for conversations with tools


def assert_named(tokenizer):
    template = resolve_template(
        None, None, tokenizer.chat_template, tokenizer.special_tokens, None, tokenizer.tool_use_template
    )
    plain = [{"role": "user", "content": "Hi"}]
    assert template.render(plain) == "default" and template.render(plain, [TOOL]) == "tools: weather"
    assert template.render(plain, []) == "default"
    assert ChatTemplate("own", {}).render(plain, [TOOL]) == "own"


NAMED = {"default": "default", "tool_use": "tools: {{ tools[0].function.name }}", "rag": "rag"}


def test_a_named_template_for_tools(tmp_path):
    listed = {"chat_template": [{"name": name, "template": source} for name, source in NAMED.items()]}
    assert_named(Tokenizer.from_hf_folder(save_folder(tmp_path / "list", trained(), listed)))
    folder = save_folder(tmp_path / "files", trained(), template="default")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    assert_named(Tokenizer.from_hf_folder(folder))
    values = {"chat_template": "default", "chat_template.tool_use": NAMED["tool_use"], "chat_templates": ["tool_use"]}
    assert_named(Tokenizer.from_gguf(write_gguf(tmp_path / "t.gguf", **gguf_values(trained()) | values)))
    # a file wins over everything in the config
    folder = save_folder(tmp_path / "both", trained(), listed, template="default")
    assert Tokenizer.from_hf_folder(folder).tool_use_template is None


@pytest.mark.reference
def test_transformers_takes_it_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    listed = {"chat_template": [{"name": name, "template": source} for name, source in NAMED.items()],
              "tokenizer_class": "PreTrainedTokenizerFast"}  # fmt: skip
    folder = save_folder(tmp_path / "files", trained(), {"tokenizer_class": "PreTrainedTokenizerFast"}, "default")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    for path in (save_folder(tmp_path / "list", trained(), listed), folder):
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        plain = [{"role": "user", "content": "Hi"}]
        assert theirs.apply_chat_template(plain, tokenize=False) == "default"
        assert theirs.apply_chat_template(plain, tools=[TOOL], tokenize=False) == "tools: weather"


def test_its_turns_are_masked(tmp_path):
    encoder = Encoder("chat", EncodeSettings(4096, "raise", False, ("assistant",)), tiny_tokenizer(),
                      ChatTemplate(CHATML, {}, tool_use=OBJECTS))  # fmt: skip
    encoder("d", 1, {"messages": PLAIN})
    sample = encoder("d", 2, {"messages": conversation(), "tools": [TOOL]}).sample
    assert runs(sample) == ['weather {"city": "Paris"}<|im_end|>', "It is sunny.<|im_end|>"]


# Calls alone, where a template allows nothing else


CALLS = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]</s>'


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_turn_of_calls_alone_is_trained(tools, content):
    answers = [" It is sunny.</s>"]
    assert runs(encode(MISTRAL, conversation(content=content), tools=tools)) == [CALLS, *answers]
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
    assert runs(encode(MISTRAL, conversation(content=content, more=more), tools=tools)) == [CALLS, *answers, " No.</s>"]
    assert runs(encode(MISTRAL, conversation(content=content)[:2], tools=tools)) == [CALLS]
    two = conversation(call(), call('{"city": "Rome"}'), more=more)
    assert runs(encode(MISTRAL, two, tools=tools))[0] == CALLS.replace(
        "]</s>", ', {"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>'
    )


def test_calls_after_a_result():
    second = {"role": "assistant", "tool_calls": [call('{"city": "Rome"}')]}
    result = {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi"}
    messages = [*conversation()[:3], second, result, {"role": "assistant", "content": "Rain."}]
    assert runs(encode(MISTRAL, messages, tools=[TOOL])) == [CALLS, CALLS.replace("Paris", "Rome"), " Rain.</s>"]


# What a template hides


def hidden(tmp_path, template, *records):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    store = tokenize(DatasetSpec(str(tmp_path / "d.jsonl")), loading(template=template, sequence_len=2000))
    return store.counts


PLAIN = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
FUNCTION = [PLAIN[0], {"role": "function", "name": "f", "content": "12"}, PLAIN[1]]
ROLES = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role + m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "record", "kinds"),
    [
        ("chatml", {"messages": PLAIN}, {}),
        ("chatml", {"messages": PLAIN, "tools": [TOOL]}, {"tools": 1}),
        ("chatml", {"messages": PLAIN, "functions": [TOOL["function"]]}, {"tools": 1}),
        ("chatml", {"messages": [PLAIN[0], PLAIN[1] | {"reasoning_content": "hm"}]}, {"reasoning": 1}),
        ("chatml", {"messages": [PLAIN[0], PLAIN[1] | {"tool_calls": [call()]}, *FUNCTION[1:]]}, {"tools": 1}),
        (OBJECTS, {"messages": PLAIN, "tools": [TOOL]}, {}),
        (OBJECTS, {"messages": conversation(), "tools": [TOOL]}, {}),
        (ROLES, {"messages": FUNCTION}, {"messages": 1}),
        (ROLES, {"messages": [{"role": "system", "content": "Be brief."}, *PLAIN]}, {"messages": 1}),
        ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, {}),
        ("gemma", {"messages": [{"role": "system", "content": "Be brief."}, *PLAIN]}, {}),
        (OBJECTS.replace("m.content", "m.content | upper"), {"messages": PLAIN}, {}),
    ],
)
def test_what_is_hidden_is_counted(tmp_path, template, record, kinds):
    counts = hidden(tmp_path, template, record)
    assert counts.hidden() == kinds
    assert ("the chat template does not show" in summary(counts)) == bool(kinds)


def test_reasoning_of_earlier_turns(tmp_path):
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}
    assert hidden(tmp_path, THINKING, {"messages": [PLAIN[0], thought]}).hidden() == {}
    counts = hidden(tmp_path, THINKING, {"messages": [PLAIN[0], thought, *PLAIN]}, {"messages": PLAIN})
    assert counts.hidden() == {"reasoning": 1} and counts.samples == 2
