"""`lorawgpu serve` against the Python API, asked by OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import openai
import pytest
from byte_model import CASE
from serving import BASE, FIRST, SECOND, save_other, served

from lorawgpu.doctor.tiny_models import random_adapter
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.serve.text import AnswerText
from lorawgpu.serve.tool_calls import FORMATS

PROMPT = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, llm):
    return {FIRST: CASE / "adapter_init", SECOND: save_other(tmp_path_factory.mktemp("adapters") / "two", llm.config)}


@pytest.fixture(scope="module")
def site(llm, folders):
    with served(llm, folders) as found:
        yield found


@pytest.fixture(scope="module")
def client(site):
    return site.client()


def ask(client, model=FIRST, messages=PROMPT, **options):
    return client.chat.completions.create(
        model=model, messages=messages, **{"temperature": 0, "max_tokens": 12} | options
    )


def text_of(answer):
    return answer.choices[0].message.content


def streamed(parts):
    return "".join(p.choices[0].delta.content or "" for p in parts if p.choices)


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == [BASE, FIRST, SECOND]
    assert client.models.retrieve(SECOND).parent == BASE
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, "third")
    assert error.value.code == "model_not_found"


def test_an_answer_is_that_of_the_python_api(llm, client):
    for model, use in ((FIRST, True), (BASE, False)):
        answer = ask(client, model)
        assert text_of(answer) == llm.generate(PROMPT, max_new_tokens=12, use_adapter=use)
        assert answer.choices[0].finish_reason == "length" and answer.model == model
        usage = answer.usage
        assert usage.prompt_tokens == len(llm.encode(PROMPT)) and usage.completion_tokens == 12
        assert usage.total_tokens == usage.prompt_tokens + 12
    assert text_of(ask(client, SECOND)) not in (text_of(ask(client, FIRST)), text_of(ask(client, BASE)))


def test_a_stream_is_the_same_answer(client):
    whole = ask(client, max_tokens=30)
    parts = list(ask(client, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert streamed(parts) == text_of(whole) and len(parts) > 4
    assert parts[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "length"
    assert parts[-1].choices == [] and parts[-1].usage == whole.usage and parts[0].usage is None
    assert {p.id for p in parts} == {parts[0].id}
    without = list(ask(client, max_tokens=5, stream=True))
    assert all(p.usage is None and p.choices for p in without)


def test_sampling_follows_the_seed(llm, client):
    options = {"temperature": 1.0, "top_p": 0.95, "seed": 5, "n": 3}
    first, again = ask(client, **options), ask(client, **options)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices] and len(set(texts)) > 1
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert texts[0] == llm.generate(PROMPT, max_new_tokens=12, temperature=1.0, top_p=0.95, seed=5)
    assert texts[0] == text_of(ask(client, **options | {"n": 1}))
    assert text_of(ask(client, temperature=1.5)) != text_of(ask(client, temperature=1.5))  # a seed of its own each time


def test_stop_strings_end_an_answer(client):
    whole = text_of(ask(client, max_tokens=30))
    stop = whole[9:12]
    at = whole.index(stop)
    answer = ask(client, max_tokens=30, stop=["never there", stop])
    assert text_of(answer) == whole[:at] and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30
    parts = list(ask(client, max_tokens=30, stop=stop, stream=True))
    assert streamed(parts) == whole[:at]


def test_log_probabilities_are_those_of_the_logits(llm, client):
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode("utf-8", "replace") == text_of(answer)
    prompt, ids = llm.encode(PROMPT), llm.encode(PROMPT)
    for _ in range(4):
        ids.append(int(llm.logits(ids)[-1].argmax()))
    logs = log_softmax(llm.logits(ids)[len(prompt) - 1 : -1].astype(np.float64))
    for at, (token, row) in enumerate(zip(content, logs, strict=True)):
        assert abs(token.logprob - row[ids[len(prompt) + at]]) < 1e-4
        np.testing.assert_allclose([t.logprob for t in token.top_logprobs], np.sort(row)[::-1][:3], atol=1e-4)
        assert token.top_logprobs[0].bytes == token.bytes  # greedy
    assert ask(client).choices[0].logprobs is None
    parts = list(ask(client, logprobs=True, max_tokens=4, stream=True))
    assert [t.logprob for p in parts if p.choices and p.choices[0].logprobs for t in p.choices[0].logprobs.content] == [
        t.logprob for t in content
    ]


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.long
def test_32_clients_get_the_answers_that_they_get_alone(client):
    """Two adapters and the base, short and long prompts, streams and not, some with log-probabilities or samples."""
    jobs = []
    for i in range(32):
        messages = [{"role": "user", "content": f"question {i} " * (1 + i % 5)}]
        options = {"model": (FIRST, SECOND, FIRST, BASE)[i % 4], "messages": messages, "max_tokens": 4 + i % 9}
        jobs.append(
            options | ({"temperature": 1.0, "seed": i} if i % 8 == 7 else {}) | ({"logprobs": True} if i == 9 else {})
        )

    def run(options, stream):
        return streamed(ask(client, **options, stream=True)) if stream else text_of(ask(client, **options))

    alone = [run(job, False) for job in jobs]
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(run, jobs, [i % 2 == 0 for i in range(32)]))
    assert together == alone and len(set(alone)) > 20


def test_a_client_that_goes_away_frees_its_place(site, client):
    for stream in (True, False):
        body = {"model": FIRST, "messages": PROMPT, "max_tokens": 100, "stream": stream, "n": 8, "temperature": 0}
        connection = _begun(site, body)
        connection.close()
        site.idle()
    assert site.service.scheduler.slots.take(site.service.scheduler.slots.count)  # all of the cache is free again
    site.service.scheduler.slots.give(range(site.service.scheduler.slots.count))


def _begun(site, body):
    """A connection whose request is being answered."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    while not site.service.scheduler.active:
        pass
    return connection


# Completions


def complete(client, prompt, model=FIRST, **options):
    return client.completions.create(model=model, prompt=prompt, **{"temperature": 0, "max_tokens": 8} | options)


def test_completions_continue_text_and_tokens(llm, client):
    texts = ["some text", "other"]
    ids = [llm.prompts.raw(text) for text in texts]
    want = llm.generate(texts, raw=True, max_new_tokens=8)
    for prompt in (texts, ids):
        answer = complete(client, prompt)
        assert [c.text for c in answer.choices] == want and answer.usage.prompt_tokens == sum(map(len, ids))
    assert complete(client, texts[0], n=2, temperature=1, seed=1).choices[0].index == 0
    assert complete(client, ids[0]).choices[0].text == want[0]
    assert len(complete(client, texts[1], max_tokens=None).choices[0].text.encode()) >= 8  # OpenAI's 16 tokens
    parts = list(complete(client, texts[0], stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == want[0] and parts[-1].usage.completion_tokens == 8


def test_an_echo_has_the_log_likelihoods_of_the_logits(llm, client):
    """What `lm-eval`'s local-completions sends, and reads: prompts as token ids, with one token to spare."""
    prompts = [llm.prompts.raw("the first prompt, é 😀"), llm.prompts.raw("b"), list(range(5, 150))]
    answer = complete(client, prompts, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, ids in zip(sorted(answer.choices, key=lambda c: c.index), prompts, strict=True):
        found, logs = choice.logprobs, log_softmax(llm.logits(ids).astype(np.float64))
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(ids) + 1
        want = logs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found.token_logprobs[1:-1], want, atol=1e-4)
        for name, top, score in zip(found.tokens[1:-1], found.top_logprobs[1:-1], logs[:-1], strict=True):
            assert name in top and abs(max(top.values()) - score.max()) < 1e-4
        assert choice.text.startswith(llm.prompts.tokenizer.decode(ids))
        assert (
            found.text_offset[:3] == [0, len(found.tokens[0]), len(found.tokens[0] + found.tokens[1])][: len(ids) + 1]
        )
    only = complete(client, prompts[0], max_tokens=0, logprobs=2, echo=True).choices[0]
    assert len(only.logprobs.tokens) == len(prompts[0]) and only.finish_reason == "length"
    np.testing.assert_allclose(
        only.logprobs.token_logprobs[1:], answer.choices[0].logprobs.token_logprobs[1:-1], atol=1e-6
    )
    assert "bytes:\\xf0" in only.logprobs.tokens


# Adapters that come and go


def test_adapters_are_loaded_and_unloaded(site, client, folders):
    status, body = site.post("/v1/load_lora_adapter", {"lora_name": "third", "lora_path": str(folders[SECOND])})
    assert status == 200 and "third" in body["message"]
    assert "third" in [m.id for m in client.models.list()]
    assert text_of(ask(client, "third")) == text_of(ask(client, SECOND))
    stream = ask(client, "third", max_tokens=60, stream=True)
    next(stream)
    assert site.post("/v1/unload_lora_adapter", {"lora_name": "third"})[0] == 200
    assert list(stream)[-1].choices[0].finish_reason == "length"  # what has begun is finished
    with pytest.raises(openai.NotFoundError):
        ask(client, "third")
    status, body = site.post("/v1/unload_lora_adapter", {"lora_name": "third"})
    assert status == 404 and body["error"]["code"] == "model_not_found"
    assert text_of(ask(client, SECOND)) == text_of(ask(client, SECOND))


@pytest.mark.long
def test_a_broken_adapter_fails_alone(site, client, llm, tmp_path):
    """Finite weights whose product is not: its answers are errors, those of others at the same time are not."""
    lora, tensors = read_adapter(CASE / "adapter_init", llm.config)
    write_adapter(tmp_path / "huge", lora, {name: np.full_like(t, 1e30) for name, t in tensors.items()}, BASE)
    want = text_of(ask(client, max_tokens=40))
    assert site.post("/v1/load_lora_adapter", {"lora_name": "huge", "lora_path": str(tmp_path / "huge")})[0] == 200
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, client, max_tokens=40)
        with pytest.raises(openai.InternalServerError, match="not finite"):
            ask(client, "huge", max_tokens=40)
        with pytest.raises(openai.APIError, match="not finite"):
            list(ask(client, "huge", max_tokens=40, stream=True))
        assert text_of(other.result()) == want
    site.post("/v1/unload_lora_adapter", {"lora_name": "huge"})
    assert text_of(ask(client, max_tokens=40)) == want


# Tools


def test_tools_reach_the_template_and_calls_come_back(client, site, monkeypatch):
    """The model cannot write calls, so one is put in the place of what it says."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    served = site.service.models.find(FIRST)
    monkeypatch.setitem(vars(served), "tools", FORMATS["hermes"])
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    seen = []
    chat = served.prompts.chat
    monkeypatch.setattr(served.prompts, "chat", lambda messages, tools: seen.append(tools) or chat(messages, tools))
    delta = AnswerText.delta

    def said(answer, turn, done):
        found = delta(answer, turn, done)
        return replace(found, text=f"Look: {call}" if found.reason else "")

    monkeypatch.setattr(AnswerText, "delta", said)
    answer = ask(client, tools=tools).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Look: "
    (found,) = answer.message.tool_calls
    assert found.function.name == "look" and json.loads(found.function.arguments) == {"at": "é"}
    assert seen[-1][0]["function"]["name"] == "look"
    parts = [p.choices[0] for p in ask(client, tools=tools, stream=True)]
    (call_part,) = [p.delta.tool_calls[0] for p in parts if p.delta.tool_calls]
    assert call_part.index == 0 and call_part.function.arguments == found.function.arguments
    assert parts[-1].finish_reason == "tool_calls" and "".join(p.delta.content or "" for p in parts) == "Look: "
    assert ask(client, tools=tools, tool_choice="none").choices[0].message.content.endswith("</tool_call>")
    assert seen[-1] is None


def test_adapters_that_train_rows_of_the_embedding(site, client, llm, tmp_path):
    """Their own rows are used; rows that the served model does not have are refused."""
    for name, token, status in (("rows", 7, 200), ("more", llm.config.vocab_size, 400)):
        lora = LoraConfig(4, 8, ("q_proj",), trainable_token_indices={"embed_tokens": (token,)})
        model = replace(llm.config, vocab_size=llm.config.vocab_size + 1)
        write_adapter(tmp_path / name, lora, random_adapter(lora, model), "base")
        got, body = site.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)})
        assert got == status and (got == 200 or "has rows for 1 tokens that the base model lacks" in str(body))
    assert isinstance(text_of(ask(client, "rows")), str)
    site.post("/v1/unload_lora_adapter", {"lora_name": "rows"})
