"""The page of `lorawgpu serve` in headless Chromium: a chat, an adapter switch, a stop."""

import json
from pathlib import Path

import pytest
from byte_model import CASE
from chromium import Page
from serving import BASE, FIRST, SECOND, save_other, served

SHOT = Path(__file__).parent.parent / "docs" / "serve.png"
SET = "Object.assign(document.getElementById({id}), {{value: {value}}})"
TURNS = "[...document.querySelectorAll('section:nth-of-type({side}) .turn')].map(t => [t.dataset.who, t.textContent])"
IDLE = "!document.getElementById('send').disabled"


def put(page, element, value):
    page.value(SET.format(id=json.dumps(element), value=json.dumps(value)) + ".id")


def say(page, text):
    put(page, "prompt", text)
    page.value("document.querySelector('form').requestSubmit()")


def turns(page, side):
    return page.value(TURNS.format(side=side))


@pytest.mark.long
def test_a_chat_an_adapter_switch_and_a_stop(tmp_path, llm):
    adapters = {FIRST: CASE / "adapter_init", SECOND: save_other(tmp_path / "two", llm.config)}
    with served(llm, adapters) as site, Page(site.url, tmp_path / "profile", (1240, 760)) as page:
        page.wait("document.querySelectorAll('option').length === 6")
        models = "[...document.querySelectorAll('select')].map(s => s.value)"
        assert page.value(models) == [BASE, FIRST] and page.value("document.getElementById('both').checked")
        put(page, "temperature", 0)
        put(page, "tokens", 8)
        question = [{"role": "user", "content": "hello"}]
        say(page, "hello")
        page.wait(IDLE)
        want = {name: llm.generate(question, max_new_tokens=8, use_adapter=name == FIRST) for name in (BASE, FIRST)}
        assert turns(page, 1) == [["you", "hello"], [BASE, want[BASE]]]
        assert turns(page, 2) == [["you", "hello"], [FIRST, want[FIRST]]]
        assert "a second" in page.value("document.querySelector('.speed').textContent")

        page.value("document.querySelectorAll('select')[1].value = " + json.dumps(SECOND))
        say(page, "and <b>now</b>?")
        page.wait(IDLE)
        history = [
            *question,
            {"role": "assistant", "content": want[FIRST]},
            {"role": "user", "content": "and <b>now</b>?"},
        ]
        answer = site.client().chat.completions.create(model=SECOND, messages=history, temperature=0, max_tokens=8)
        assert turns(page, 2)[2:] == [["you", "and <b>now</b>?"], [SECOND, answer.choices[0].message.content]]

        page.value("document.getElementById('clear').click()")
        assert turns(page, 1) == turns(page, 2) == []
        put(page, "tokens", 120)
        page.value("document.getElementById('both').click()")
        say(page, "go on")
        page.wait("document.querySelector('section .turn:last-child').textContent.length > 2")
        page.value("document.getElementById('stop').click()")
        page.wait(IDLE)
        site.idle()
        assert len(turns(page, 1)) == 2 and turns(page, 2) == [] and len(turns(page, 1)[-1][1]) < 120

        put(page, "tokens", 10_000)
        say(page, "too much")
        page.wait(IDLE)
        assert "maximum context length" in turns(page, 1)[-1][1] and turns(page, 1)[-1][0] == "error"
        assert page.value("performance.getEntriesByType('resource').every(e => e.name.startsWith(location.origin))")
        assert not [e for e in page.errors if "400" not in json.dumps(e)], page.errors
        page.screenshot(tmp_path / "serve.png")
        assert (tmp_path / "serve.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_page_asks_for_the_key(tmp_path, llm):
    with served(llm, {}, key="sesame") as site, Page(site.url, tmp_path / "profile") as page:
        page.wait("document.getElementById('locked')?.hidden === false")
        put(page, "key", "sesame")
        page.value("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.wait("document.querySelectorAll('option').length === 2")
