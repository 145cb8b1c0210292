"""Turns with more than plain text: reasoning, tool calls, content parts."""

from chats import encode, runs, turns
from tiny_tokenizer import tiny_tokenizer

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


def test_reasoning_that_the_template_shows_only_in_the_last_turn():
    messages = turns("Hi", "<think>\nhm\n</think>\n\nYes", "And", "<think>\nso\n</think>\n\n42.")
    assert runs(encode(THINKING, messages)) == ["Yes<|im_end|>", "<think>\nso\n</think>\n\n42.<|im_end|>"]


def test_reasoning_given_in_a_key_of_its_own():
    messages = turns("Hi", "Yes")
    messages[1]["reasoning_content"] = "hm"
    assert runs(encode(THINKING, messages)) == ["<think>\nhm\n</think>\n\nYes<|im_end|>"]


def test_tool_calls_are_trained():
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


def test_a_template_that_requires_a_tool_call_before_its_answer():
    """As Mistral's: roles alternate, tool calls have no header, and only a call may precede a tool's answer."""
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
