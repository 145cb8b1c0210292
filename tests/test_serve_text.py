"""What surrounds the tokens of an answer: stop strings, log-probabilities, tool calls in three formats."""

import json

import numpy as np
import pytest
from byte_model import byte_tokenizer

from lorawgpu.generate.prompts import TextStream
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.models import parse_adapters
from lorawgpu.serve.schema import ChatRequest, CompletionRequest, parse
from lorawgpu.serve.scores import scores_of
from lorawgpu.serve.text import StopStrings
from lorawgpu.serve.tool_calls import FORMATS, CallReader, format_of

WEATHER, TIME = ("get_weather", {"city": "Paris", "days": 2}), ("get_time", {})
# What models of these families write, as their cards and templates show it.
WRITTEN = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}',  # the end was cut
    ],
    "llama3": [
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "get_time", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "get_time", "arguments": {}}]',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]get_time[ARGS]{}',
        '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris", "days": 2}',
    ],
}
# What is no call, though it begins like one; it is shown as it is.
TEXTS = {
    "hermes": [
        "<tool_call>\n{broken</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_cal",
        "a < b",
    ],
    "llama3": ['{"a": 1}', "{not json", '{"name": "rm", "parameters": {}}', "{", " {}", 'so {"name": "get_time"}'],
    "mistral": ["[TOOL_CALLS] oops", "[TOOL_CALLS]", "[TOOL", "see [1]", '[TOOL_CALLS][{"name": 7}]'],
}


def read(format, text, size):
    """The text that is shown, and the calls, of an answer that comes in pieces of `size` characters."""
    reader = CallReader(FORMATS[format], {"get_weather", "get_time"})
    shown = "".join(reader.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = reader.finish()
    return shown + rest, calls


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("format", "text"), [(f, t) for f, texts in WRITTEN.items() for t in texts])
def test_calls_are_read(format, text, size):
    shown, calls = read(format, text, size)
    assert shown.strip() == ""
    want = [WEATHER, TIME] if "get_time" in text else [WEATHER]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == want
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("format", "text"), [(f, t) for f, texts in TEXTS.items() for t in texts])
def test_what_is_no_call_stays_text(format, text, size):
    assert read(format, text, size) == (text, [])


def test_text_before_a_call_is_shown_at_once():
    reader = CallReader(FORMATS["hermes"], {"get_time"})
    assert reader.push("Let me look.<to") == "Let me look."
    assert reader.push('ol_call>{"name": "get_time", "arguments": {}}</tool_call>') == ""
    assert [c.name for c in reader.finish()[1]] == ["get_time"]
    assert len(FORMATS["mistral"].call_id()) == 9  # Mistral's templates want nine characters


def test_the_format_is_the_templates():
    assert format_of("{% if tools %}<tool_call>{% endif %}") is FORMATS["hermes"]
    assert format_of("{{ '[TOOL_CALLS] ' }}") is FORMATS["mistral"]
    assert format_of("{{ '<|python_tag|>' }}") is FORMATS["llama3"] is format_of("{% if tools %}ipython{% endif %}")
    assert format_of("plain") is None is format_of(None)


@pytest.mark.parametrize("pieces", [["one STOP two"], list("one STOP two"), ["one S", "TO", "P two"]])
def test_a_stop_string_may_span_pieces(pieces):
    stops, shown = StopStrings(["STOP", "TOP"]), ""
    for piece in pieces:
        text, ended = stops.push(piece)
        shown += text
        if ended:
            break
    assert shown == "one " and ended
    held = StopStrings(["abc"])
    assert held.push("xab") == ("x", False) and held.push("", last=True) == ("ab", False)
    assert StopStrings([]).push("all of it") == ("all of it", False)


def test_scores_are_the_log_softmax():
    logits = np.random.default_rng(0).normal(0, 30, (3, 500)).astype(np.float32)
    logits[1, 7] = logits[1, 9] = 500
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=-1, keepdims=True)
    for i, score in enumerate(scores_of(logits, [5, 9, 0], 4)):
        assert abs(score.logprob - exact[i, score.token]) < 1e-6
        assert [t for t, _ in score.top] == np.argsort(-exact[i], kind="stable")[:4].tolist()
        np.testing.assert_allclose([p for _, p in score.top], np.sort(exact[i])[::-1][:4], atol=1e-5)
    assert scores_of(logits, [1, 2, 3], 0)[0].top == []


def test_a_stream_of_text_is_resumed_anywhere():
    """Characters of up to four bytes, one token a byte, with a control token between."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("héllo 😀<|im_end|> wörld €")
    whole, state, text = TextStream(tokenizer, strip=True), ([], 0, True), ""
    want = "".join(map(whole.push, ids)) + whole.finish()
    for token in ids:
        stream = TextStream.resumed(tokenizer, *state)
        text += stream.push(token)
        state = stream.state
        assert len(state[0]) <= 8  # the worker is sent no more than it needs
    assert text + TextStream.resumed(tokenizer, *state).finish() == want == "héllo 😀 wörld €"


def test_the_bytes_of_a_token():
    tokenizer = byte_tokenizer()
    text = "é😀 \n<|im_end|>"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_openai_defaults_and_extensions():
    asked = parse(
        CompletionRequest, b'{"model": "m", "prompt": [[1, 2], [3]], "stop": null, "top_k": -1, "logit_bias": {}}'
    )
    assert asked.prompt == [[1, 2], [3]] and asked.stops == () and not asked.wants_usage
    tools = b'"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    asked = parse(
        ChatRequest, b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "user": "u", ' + tools + b"}"
    )
    assert asked.tools[0].function.name == "f" and asked.temperature is None
    with pytest.raises(ApiError, match="Did you mean temperature"):
        parse(ChatRequest, b'{"model": "m", "messages": [{}], "temprature": 1}')


def test_adapters_of_the_command_line(tmp_path):
    assert list(parse_adapters([f"a={tmp_path}/x", f"{tmp_path}/y"])) == ["a", "y"]
