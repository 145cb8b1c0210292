"""Chat templates: which one is used, what they may do, and what they reject."""

import pickle
from datetime import datetime

import pytest
from chats import encode, turns

from lorawgpu.chat.builtin import BUILT_IN
from lorawgpu.chat.template import ChatTemplate, TemplateFailed, resolve_template
from lorawgpu.data.bad_line import BadLine
from lorawgpu.errors import UserError


def test_bitnets_template():
    template = resolve_template("bitnet", None, None, {"bos_token": "<s>"})
    text = template.render(turns("Hi ", "Yes"), add_generation_prompt=True)
    assert text == "<s>User: Hi<|eot_id|>Assistant: Yes<|eot_id|>Assistant: "


def test_a_turn_that_the_template_hides_is_an_error():
    template = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    with pytest.raises(BadLine, match=r"line 7: the chat template hides messages\[1\] \(assistant\)"):
        encode(template, turns("Hi", "Yes", "And", "42."))


def test_a_template_that_raises_names_the_line_and_its_reason():
    with pytest.raises(BadLine, match="line 7: the chat template .*: the mistral template has no role tool"):
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
    with pytest.raises(UserError, match="`chatmi`; wanted one of chatml"):
        resolve_template("chatmi", None, None, tokens)
    with pytest.raises(UserError, match="not both"):
        resolve_template("chatml", "x{{ y }}", None, tokens)
    with pytest.raises(UserError, match="not a readable file"):
        resolve_template(None, str(tmp_path / "none.jinja"), None, tokens)
    with pytest.raises(UserError, match="not valid Jinja: line 2"):
        resolve_template(None, "a\n{% for %}", None, tokens)


def test_templates_travel_to_worker_processes():
    template = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }}", {})
    assert pickle.loads(pickle.dumps(template)).render([]) == template.render([])
