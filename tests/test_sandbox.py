"""The sandbox of chat templates: what untrusted templates cannot do, and that honest ones render unchanged."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import MAX_TEMPLATE, ChatTemplate, GuardedTemplate, TemplateFailed
from lorawgpu.errors import UserError
from lorawgpu.guard import limits

TURNS = [{"role": "user", "content": "Hi *there*"}, {"role": "assistant", "content": " Yes. \n"}] * 3
BIG = 10**10
GROWING = "{%% set ns = namespace(x='ab', y='ab') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
AGAIN = "{%% for i in range(99999) %%}{%% set x = %s %%}{%% endfor %%}"
TOO_MUCH = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that skips": "{% for a in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "a loop of much code": "{% for a in range(99999) %}" + "{% set b = a %}" * 1000 + "{% endfor %}",
    "a macro that doubles": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for x in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 3 }}{% endfor %}",
    "text times": f"{{{{ 'a' * {BIG} }}}}",
    "list times": f"{{{{ [0] * {BIG} }}}}",
    "a power": "{{ 10 ** 100000000 }}",
    "squares": GROWING % "{% set ns.x = (3 if loop.first else ns.x) * (3 if loop.first else ns.x) %}",
    "doubled by +": GROWING % "{% set ns.x = ns.x + ns.x %}",
    "doubled by ~": GROWING % "{% set ns.x = ns.x ~ ns.x %}",
    "doubled in a block": GROWING % "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}",
    "lists that hold themselves twice": GROWING % "{% set ns.x = [ns.x, ns.x] %}",
    "such lists compared": GROWING % "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}" + "{{ ns.x < ns.y }}",
    "such objects as JSON": GROWING % "{% set ns.x = {'a': ns.x, 'b': ns.x} %}" + "{{ ns.x | tojson }}",
    "width of %": "{{ '%9999999999d' % 1 }}",
    "width from the arguments": "{{ '%*d' % (9999999999, 1) }}",
    "width of a format": "{{ '{:>9999999999}'.format(1) }}",
    "width of a format, from its arguments": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "the format filter": "{{ '%9999999999d' | format(1) }}",
    "center": f"{{{{ 'a' | center({BIG}) }}}}",
    "the method center": f"{{{{ 'a'.center({BIG}) }}}}",
    "center of markup": f"{{{{ ('a' | e).center({BIG}) }}}}",
    "bytes of a number": f"{{{{ (1).to_bytes({BIG}, 'big') }}}}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ ('a' * 100000).join(range(20000) | map('string')) }}",
    "the filter join": "{{ range(20000) | join('a' * 100000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "indent by a text": "{{ ('a\n' * 100000) | indent('x' * 100000) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "batches": f"{{{{ [1] | batch({BIG}, 0) | list }}}}",
    "slices": f"{{{{ [1] | slice({BIG}) | list }}}}",
    "copies by slices": "{% set x = 'a' * 900000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "JSON indented": f"{{{{ messages | tojson(indent={BIG}) }}}}",
    "a sum of lists": "{{ ([[]] * 500000) | sum(start=[0] * 500000) }}",
    "a table of texts": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
    "a number in hexadecimal": "{{ ('f' * 400000) | int(0, 16) }}",
    "a long refusal": "{{ raise_exception('a' * 3000000) }}",
    "quadratic search": AGAIN % "('ab' * 400000).rfind('ba' * 40000 + 'c')",
    "quadratic count": AGAIN % "('a' * 4000000).count('b' + 'a' * 99999)",
    "a sum of texts": GROWING % "{% set ns.x = ns.x * 2 %}",
    "map of a private filter": "{{ [99999999] | map(' spend') | list }}",
    "a text argument that is a number": "{{ 'a' | center('9' * 9999999) }}",
    "a format that repeats its argument": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "JSON separators": "{{ (range(99999) | list) | tojson(separators=('x' * 999999, ':')) }}",
    "JSON indented by a text": "{{ (range(99999) | list) | tojson(indent='x' * 999999) }}",
    "punycode": "{{ ('a' * 900000 + '\u00fc' * 99999).encode('punycode') }}",
    "punycode, decoded": "{{ ('a-' + '9' * 2000000).encode().decode('punycode') }}",
    "a huge integer": "{{ (7 ** 9999999) % 10 }}",
    "a product of fractions": "{{ [1] | map(attribute='0.' * 500000 + '0') | list }}",
    "sorting itself": "{{ ([messages] * 99999) | map('tojson') | sort | list | length }}",
    "a title of titles": AGAIN % "('ab ' * 99999) | title",
    "word wrapping": "{{ ('a ' * 999999) | wordwrap(1) | length }}",
    "links": "{{ ('http://a.b ' * 199999) | urlize | length }}",
    "markup": "{{ (('<' * 999999) | e | striptags) * 9999 }}",
    "searches": AGAIN % "('b' + 'a' * 99999) in ('a' * 999999)",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture
def hasty(monkeypatch):
    """A second for rendering."""
    monkeypatch.setattr(limits, "SECONDS", (60.0, 20.0, 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("name", ["loops in loops", "text times", "quadratic search", "a sum of texts"])
def test_no_template_takes_forever_or_all_memory(hasty, name):
    """All of them: tests/test_fuzz.py."""
    with pytest.raises(UserError, match="the chat template was stopped: .* took (longer than 1 s|more than .* MiB)"):
        GuardedTemplate(TOO_MUCH[name], {}).render(TURNS)
    assert GuardedTemplate("{{ messages | length }}", {}).render(TURNS) == "6"


HIDDEN = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].clear() }}",
    "{{ open('x') }}",
    "{{ lipsum() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]
EMPTY = [
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ self._TemplateReference__context }}",
]


@pytest.mark.parametrize("source", HIDDEN)
def test_python_internals_are_out_of_reach(source):
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {}).render(TURNS)


@pytest.mark.parametrize("source", EMPTY)
def test_private_attributes_are_undefined(source):
    assert ChatTemplate(source, {}).render(TURNS) == ""


UNCOMPILED = {
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "loops": "{% for x in [1] %}" * 110 + "{% endfor %}" * 110,
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "negations": "{{ " + "not " * 9999 + "1 }}",
    "sums": "{{ " + "+".join(["1"] * 9999) + " }}",
    "no end": "{% for x in",
    "too long": "a" * (MAX_TEMPLATE + 1),
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_a_template_that_cannot_be_compiled_is_one_message(name):
    with pytest.raises(UserError, match="the chat template") as caught:
        ChatTemplate(UNCOMPILED[name], {})
    assert len(str(caught.value)) < 700


def test_a_templates_own_message_is_shortened():
    with pytest.raises(TemplateFailed) as caught:
        ChatTemplate("{{ raise_exception('no ' * 9999) }}", {}).render(TURNS)
    assert 500 < len(str(caught.value)) < 700


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("prompt", [True, False])
def test_honest_templates_render_as_in_jinja(name, prompt):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(BUILT_IN[name])
    given = {"bos_token": "<s>", "eos_token": "</s>"}
    want = plain.render(messages=TURNS, add_generation_prompt=prompt, tools=None, **given)
    assert ChatTemplate(BUILT_IN[name], given).render(TURNS, add_generation_prompt=prompt) == want


FEATURES = [
    "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in messages[::-1] if m.role == 'user' %}{{ m.content[1:3] }}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }},{% endfor %}{% for x in missing %}{% else %}none{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n % 4 }}",
    "{% macro show(m, end='.') %}{{ m.role ~ ': ' ~ m.content | trim ~ end ~ 3 }}{% endmacro %}{{ show(messages[0]) }}",
    "{{ messages | map(attribute='role') | unique | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | last }}",
    "{{ messages[0].content.split(' ')[-1].strip('*').upper() }}{{ 'Hi' in messages[0].content }}",
    "{{ 'x' not in messages[0] }}{{ '%s and %03d' % ('a', 7) }}{{ '{} {:>4}'.format('b', 2) }}",
    "{{ 7 // 2 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] + [2, 3] }}{{ 1.5 * 2 - 1 }}",
    "{{ messages is iterable and messages[0] is mapping and missing is not defined and none is none }}",
    "{{ (messages[0].content | replace('Hi', 'Ho') | indent(2)) if 1 < 2 <= 2 else '' }}{{ 'a,b' | list }}",
    "{{ 3.7 | round | int }}{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{% endset %}{{ x }}",
    "{% macro m() %}<{{ caller(3) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
    "{% for n in [{'c': [{'c': []}]}] recursive %}({{ loop(n.c) }}{{ loop.depth }}){% endfor %}",
    "{{ '%.2f' | format(1.5) }}{{ messages | length }}{{ ('a' | e) + '<' }}{{ [3, 1] | sort | join('-') }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_the_sandbox_changes_nothing_else(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    want = plain.from_string(source).render(messages=TURNS)
    assert ChatTemplate(source, {}).render(TURNS) == want


def test_long_conversations_have_long_budgets():
    turns = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "yes"}] * 1000
    for source in BUILT_IN.values():
        assert len(ChatTemplate(source, {"bos_token": "", "eos_token": ""}).render(turns)) > 1_000_000
