"""Content-independent templates are recognized by their syntax, and rendered once per sequence of roles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.loss_mask import render_with_spans
from lorawgpu.chat.spans import overlapping, spaces_before, special_token_end, token_span
from lorawgpu.chat.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = st.text(alphabet=st.sampled_from("aB \n\t7é日🙂\u200b\ue000{<|>}:"), max_size=8)
TURNS = st.lists(st.tuples(st.sampled_from(("system", "user", "assistant", "tool")), TEXT), min_size=1, max_size=5)
LOOP = "{% for m in messages %}HERE{% endfor %}"


def loop(body: str) -> str:
    return LOOP.replace("HERE", body)


INDEPENDENT = [
    *(BUILT_IN[name] for name in ("chatml", "llama-3", "bitnet", "alpaca")),
    loop("{{ m.role }}: {{ m.content }}{{ '' if loop.last else '\n' }}"),
    loop("{% set head = '<' ~ m['role'] | upper ~ '>' %}{{ head + m['content'] | trim + eos_token }}"),
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}"
    + loop("{% if not loop.first or m.role != 'system' %}{{ m.content }};{% endif %}"),
    loop("{% generation %}{{ m.content if m.role == 'user' else m.content | trim }}~{% endgeneration %}"),
    loop("{{ messages | length }}{{ m.content }}{{ m.name }}"),
]
INSPECTING = [
    loop("{% if m.content %}{{ m.content }}{% endif %}"),
    loop("{% if 'x' in m.content %}!{% endif %}{{ m.content }}"),
    loop("{% set c = m.content %}{{ c }}"),
    loop("{{ (m.role + m.content) | trim }}"),
    loop("{{ m.content | upper }}"),
    loop("{{ m.content[:3] }}"),
    loop("{{ m.content.strip() }}"),
    loop("{{ m['con' + 'tent'] }}"),
    loop("{{ m[k] }}"),
    loop("{{ m }}"),
    loop("{{ m.values }}"),
    loop("{{ m.content | length }}"),
    loop("{% if loop.previtem %}{{ loop.previtem.content }}{% endif %}"),
    loop("{% if loop.changed(m.content) %}{{ m.content }}{% endif %}"),
    loop("{% set n = m %}{% if n.content == 'a' %}{{ n.role }}{% endif %}{{ m.content }}"),
    loop("{% if m.content == 'a' %}{{ raise_exception(m.content) }}{% endif %}{{ m.content }}"),
    "{{ messages }}",
    "{% set all = messages %}" + loop("{{ all[0].content | length }}{{ m.content }}"),
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% for m in messages | map(attribute='content') %}{{ m }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% macro f(x) %}{{ x | length }}{% endmacro %}" + loop("{{ f(m.content) }}"),
    "{% set ns = namespace(t='') %}" + loop("{% set ns.t = ns.t + m.content %}") + "{{ ns.t | length }}",
    BUILT_IN["gemma"],
]


@pytest.mark.parametrize("source", INSPECTING)
def test_a_template_that_may_inspect_contents_is_not_content_independent(source):
    assert not ChatTemplate(source, SPECIAL).content_independent


@pytest.mark.parametrize("source", INDEPENDENT)
def test_the_filled_layout_is_what_rendering_gives(source):
    template, layouts = ChatTemplate(source, SPECIAL), {}
    assert template.content_independent

    @given(TURNS)
    def check(turns):
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            wanted = template.render(messages)
        except Exception as error:  # the template rejects this sequence of roles
            with pytest.raises(type(error)):
                render_with_spans(template, messages, None, [], layouts)
            return
        text, spans = render_with_spans(template, messages, None, [], layouts)
        assert text == wanted and spans == []
        if all(messages[i]["content"].strip() for i in range(len(messages))) and layouts[tuple(r for r, _ in turns)]:
            found = render_with_spans(template, messages, None, list(range(len(messages))), layouts)[1]
            assert [text[a:b].strip() for a, b in found] == [content.strip() for _, content in turns]

    check()


def test_a_sequence_of_roles_is_rendered_once(monkeypatch):
    template, layouts = ChatTemplate(BUILT_IN["chatml"], SPECIAL), {}
    renders = []
    real = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *args: (renders.append(1), real(self, *args))[1])
    for content in ("a", "b ", ""):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        assert render_with_spans(template, messages, None, [1], layouts)[0] == real(template, messages)
    assert len(renders) == 2  # of placeholders, and of placeholders with spaces around them


@given(st.text(alphabet=st.sampled_from("ab  Yé日🙂7\n</s>:"), max_size=25), st.data())
def test_tokens_of_a_span_are_those_that_overlap_it(text, data):
    tokenizer = tiny_tokenizer()
    encoding = tokenizer.encoding(text)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    first, last = token_span(encoding, (start, end))
    assert list(range(first, last)) == np.flatnonzero(overlapping(offsets, [(start, end)])).tolist()
    first, last = spaces_before(text, encoding, start)
    bare = len(text[:start].rstrip(" "))
    held = [i for i, (a, b) in enumerate(encoding.offsets) if bare <= a < b <= start]
    assert list(range(first, last)) == held
    special = {a: b for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True) if i in tokenizer.special_ids}
    assert special_token_end(encoding, encoding.ids, tokenizer.special_ids, start) == special.get(start)
