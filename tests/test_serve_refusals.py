"""Requests that are wrong, or hostile: each gets a 4xx that says why, at once, and the server goes on."""

import json
import logging
import socket
import threading
import time

import pytest
from byte_model import CASE
from serving import BASE, FIRST, served

from lorawgpu.serve import http as serve_http
from lorawgpu.serve import limits
from lorawgpu.serve.setup import Sizes

KEY = "sesame"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
USER = {"role": "user", "content": "hi"}
GOOD = {CHAT: {"model": BASE, "messages": [USER]}, TEXT: {"model": BASE, "prompt": "hi"},
        LOAD: {"lora_name": "x", "lora_path": "/nowhere"}, UNLOAD: {"lora_name": FIRST}}  # fmt: skip
FUNCTION = {"type": "function", "function": {}}
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [
    {}, {"role": "user"}, {"role": "usr", "content": "a"}, {"role": None, "content": "a"}, {"content": "a"},
    {"role": "user", "content": None}, {"role": "user", "content": 7}, {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": ["a"]},
    {"role": "user", "content": [{"type": "text", "text": 7}]}, {"role": ["user"], "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": "x"}, {"role": "user", "content": "x" * 500},
]  # fmt: skip


@pytest.fixture(scope="module")
def site(llm):
    with served(llm, {FIRST: CASE / "adapter_init"}, Sizes(cache=2048, sequences=4, waiting=4)) as found:
        yield found


# Bodies that are no JSON, or no object

BODIES = {
    "nothing": b"",
    "half": b'{"model": "base", "messages": [',
    "two": b"{}{}",
    "a comma": b'{"model": "base",}',
    "a comment": b'{"model": "base" /* x */}',
    "single quotes": b"{'model': 'base'}",
    "a list": b"[]",
    "a string": b'"base"',
    "a number": b"17",
    "null": b"null",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": json.dumps(GOOD[CHAT]).encode("utf-16"),
    "half a surrogate": b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"model": "base", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "infinity": b'{"model": "base", "messages": [{"role": "user", "content": "a"}], "temperature": Infinity}',
    "a huge number": b'{"model": "base", "messages": [], "temperature": 1e999}',
    "a huge integer": b'{"model": "base", "seed": ' + b"9" * 5000 + b"}",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a form": b"model=base&prompt=hi",
    "zeros": bytes(100),
}  # fmt: skip

# Changes of a good request: the path, what is changed, and the parameter that the answer names


def changes(name, *values, paths=(CHAT, TEXT), named=True, also=()):
    return [(path, {**dict(also), name: value}, name if named else None) for path in paths for value in values]


WRONG = [
    *changes("model", None, "", 7, ["base"], {}, True, "x" * 300),
    *changes("temperature", -1, 2.1, "1", [1], True, {}),
    *changes("top_p", -0.1, 1.1, "1", []),
    *changes("n", 0, -1, 1.5, "1", 129, True),
    *changes("max_tokens", -1, 1.5, "9", 1 << 40, [1]),
    *changes("seed", 1.5, "1", 1 << 70, []),
    *changes("stop", 7, ["a"] * 5, [1], "", [""], {}, "x" * 600),
    *changes("stream", "yes", 1, []),
    *changes("stream_options", True, [], {"include_usage": True}),
    *changes("top_k", -2, 1.5, "1", 1 << 40),
    *changes("min_p", -1, 2),
    *changes("repetition_penalty", 0, -1, 1000),
    *changes("frequency_penalty", 3, 0.5, "1"),
    *changes("presence_penalty", -3, -0.5),
    *changes("logit_bias", {"5": 1}, [], {"5": "x"}),
    *changes("temprature", 1),
    *changes("", 1),
    *changes("messages", None, [], "hi", {}, [None], ["hi"], [[]], [7], [USER] * 5000, paths=(CHAT,)),
    *changes("logprobs", 3, "yes", paths=(CHAT,)),
    *changes("top_logprobs", -1, 21, 1.5, True, paths=(CHAT,), also={"logprobs": True}),
    *changes("top_logprobs", 3, paths=(CHAT,)),
    *changes("tools", "f", [7], [{}], [{"type": "function"}], [FUNCTION], [TOOL] * 129, paths=(CHAT,)),
    *changes("tools", [TOOL | {"type": "x"}], [{**FUNCTION, "function": {"name": ""}}], paths=(CHAT,)),
    *changes("tools", [{**FUNCTION, "function": {"name": "f", "parameters": []}}], paths=(CHAT,)),
    *changes("tool_choice", "required", "always", 7, FUNCTION, paths=(CHAT,), also={"tools": [TOOL]}),
    *changes("response_format", {"type": "json_object"}, "text", [], paths=(CHAT,)),
    *changes("max_completion_tokens", 0, -1, "1", paths=(CHAT,)),
    *changes("chat_template_kwargs", {"no": 1}, {"tools": "x"}, {"a b": 1}, [], {"a": []}, paths=(CHAT,), named=False),
    *changes("functions", [], paths=(CHAT,)),
    *changes("max_tokens", 0, 200, paths=(CHAT,)),
    *changes("prompt", None, [], 7, {}, [[]], [[1], "a"], ["a", 1], [1.5], [-1], paths=(TEXT,)),
    *changes("prompt", [1 << 40], [[1, -1]], [None], True, [True], ["a"] * 129, [[[1]]], paths=(TEXT,)),
    *changes("prompt", [999_999], [[5], [999_999]], "", ["", "a"], "x" * 500, [5] * 500, paths=(TEXT,), named=False),
    *changes("logprobs", -1, 21, True, "1", 1.5, paths=(TEXT,)),
    *changes("echo", "yes", 1, paths=(TEXT,)),
    *changes("best_of", 3, paths=(TEXT,)),
    *changes("n", 65, paths=(TEXT,), also={"prompt": ["a", "b"]}),
    *changes("suffix", "end", paths=(TEXT,)),
    *changes("prompt", "x" * 100_000, paths=(TEXT,), named=False),
    *changes("max_tokens", 0, paths=(TEXT,)),
    *changes("lora_name", None, "", 7, BASE, FIRST, "x" * 300, paths=(LOAD,)),
    *changes("lora_path", None, "", 7, "/nowhere", "\0", "../..", "x" * 5000, ".", paths=(LOAD,), named=False),
    *changes("lora_path", "/dev/zero", "/proc/self/mem", "\ud83d\ude00", paths=(LOAD,), named=False),
    *changes("lora_name", None, "", BASE, "unknown", paths=(UNLOAD,), named=False),
    *((CHAT, {"messages": [message]}, None) for message in MESSAGES),
]


def refused(site, status, body, param=None):
    """A 4xx with a message, as OpenAI's clients read it; no traceback, no path of the server."""
    assert 400 <= status < 500, (status, body)
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert "Traceback" not in error["message"] and "lorawgpu/" not in error["message"]
    assert len(error["message"]) < 1500
    if param is not None:
        assert (error["param"] or "").split("[")[0].split(".")[0] == param, error
    assert not site.service.scheduler.waiting


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request(site, name):
    for path in (CHAT, TEXT):
        refused(site, *site.post(path, BODIES[name]))


@pytest.mark.parametrize(("path", "change", "param"), WRONG, ids=[f"{p}-{str(c)[:60]}" for p, c, _ in WRONG])
def test_a_wrong_parameter_is_named(site, path, change, param):
    refused(site, *site.post(path, GOOD[path] | change), param)


@pytest.mark.parametrize(("path", "missing"), [(path, name) for path, body in GOOD.items() for name in body])
def test_a_missing_parameter_is_named(site, path, missing):
    status, body = site.post(path, {k: v for k, v in GOOD[path].items() if k != missing})
    refused(site, status, body, missing)
    assert "Missing required parameter" in body["error"]["message"]


def test_there_are_more_than_a_hundred():
    assert len(BODIES) * 2 + len(WRONG) > 200


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", CHAT, 405), ("PUT", CHAT, 405), ("DELETE", "/v1/models", 405), ("POST", "/v1/models", 405),
    ("GET", "/v1/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", "/v1/models/nothing", 404),
    ("GET", "/../../etc/passwd", 404), ("GET", "/v1/models/..%2f..%2fetc", 404), ("GET", "/%00", 404),
    ("OPTIONS", CHAT, 405), ("PATCH", "/", 405), ("GET", LOAD, 405), ("TRACE", "/health", 405),
])  # fmt: skip
def test_other_paths_and_methods(site, method, path, status):
    got, body = site.send(method, path)
    assert got == status
    refused(site, got, json.loads(body))


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"]
)
def test_another_content_type_is_refused(site, kind):
    """Pages of other sites may send these without asking first."""
    headers = {"Content-Type": kind} if kind else {}
    status, body = site.send("POST", CHAT, json.dumps(GOOD[CHAT]).encode(), headers)
    assert status == 415
    refused(site, status, json.loads(body))


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Host": "evil.example:8000"}, {"Host": "127.0.0.1.evil.example"}, {"Host": ""},
    {"Host": "[::1"}, {"Host": "localhost@evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
])  # fmt: skip
def test_other_sites_are_refused(site, headers):
    for method, path in (("GET", "/v1/models"), ("GET", "/"), ("POST", CHAT)):
        status, body = site.send(method, path, b"{}", headers | {"Content-Type": "application/json"})
        assert status == 403
        refused(site, status, json.loads(body))


def test_our_own_names_are_answered(site):
    for host in ("localhost", f"127.0.0.1:{site.port}", "[::1]:9", "LOCALHOST:1"):
        assert site.send("GET", "/health", headers={"Host": host})[0] == 200
    own = f"http://127.0.0.1:{site.port}"
    assert site.send("GET", "/v1/models", headers={"Origin": own})[0] == 200


# Limits


FAULTS = {  # bodies of up to 8 MB whose faults are many
    "prompt of fractions": {"prompt": [1.5] * 1_000_000},
    "prompt of lists": {"prompt": [[0.5] * 1000] * 1000},
    "messages": {"messages": [7] * 1_000_000},
    "logit_bias": {"logit_bias": {str(i): "x" for i in range(300_000)}},
    "parameters": {f"p{i}": i for i in range(300_000)},
    "chat_template_kwargs": {"chat_template_kwargs": {f"p{i}": [] for i in range(200_000)}},
    "a text": {"messages": [USER | {"content": "x " * 3_000_000}]},
    "keys of a tool": {"tools": [TOOL | {f"p{i}": i for i in range(200_000)}], "temperature": -1},
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_million_faults_are_refused_as_one(site, name):
    path = TEXT if "prompt" in FAULTS[name] else CHAT
    start = time.process_time()
    refused(site, *site.post(path, GOOD[path] | FAULTS[name]))
    assert time.process_time() - start < 5  # seconds of all threads, the client's too


def test_a_large_body_is_refused(site):
    body = json.dumps(GOOD[CHAT] | {"user": "x" * limits.MAX_BODY}).encode()
    try:
        status, found = site.post(CHAT, body)
    except (BrokenPipeError, ConnectionResetError):
        return  # refused before all of it was sent
    assert status == 413
    refused(site, status, found)


def test_a_body_that_never_ends_times_out(site, monkeypatch):
    monkeypatch.setattr(serve_http, "BODY_SECONDS", 0.2)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"
    assert b" 408 " in raw(site, head.encode())


@pytest.mark.long
def test_a_full_queue_says_so(site):
    """Four answers are in work and four wait; the ninth is refused, and after them another one is not."""
    body = GOOD[CHAT] | {"max_tokens": 60, "n": 8, "temperature": 0}
    found = []
    asked = threading.Thread(target=lambda: found.append(site.post(CHAT, body)))
    asked.start()
    while not site.service.scheduler.waiting:
        time.sleep(0.001)
    status, refusal = site.post(CHAT, GOOD[CHAT])
    assert status == 429 and refusal["error"]["code"] == "queue_full"
    status, refusal = site.post(CHAT, GOOD[CHAT] | {"stream": True})
    assert status == 429
    asked.join(60)
    assert found[0][0] == 200 and len(found[0][1]["choices"]) == 8
    assert site.post(CHAT, GOOD[CHAT] | {"max_tokens": 1})[0] == 200


def test_too_many_adapters_are_refused(site, monkeypatch):
    monkeypatch.setattr("lorawgpu.serve.models.MAX_ADAPTERS", 1)
    status, body = site.post(LOAD, {"lora_name": "more", "lora_path": str(CASE / "adapter_init")})
    refused(site, status, body)
    assert "unload one first" in body["error"]["message"]


# Bytes that are no HTTP


def raw(site, data, wait=5):
    """What the server answers to some bytes before it closes the connection, or until `wait` seconds have passed."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=wait) as connection:
        connection.sendall(data)
        found = b""
        try:
            while more := connection.recv(65536):
                found += more
                if b"\r\n\r\n" in found:
                    break
        except (TimeoutError, ConnectionResetError):
            pass
        return found


@pytest.mark.parametrize("data", [
    b"\r\n\r\n\r\n", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
])  # fmt: skip
def test_bytes_that_are_no_request(site, data):
    found = raw(site, data, wait=1)
    assert not found or found.split(b" ", 2)[1].startswith(b"4"), found[:200]
    assert site.send("GET", "/health")[0] == 200


# The key


@pytest.fixture(scope="module")
def locked(llm):
    with served(llm, {}, Sizes(context=20, cache=512), key=KEY, host="0.0.0.0") as found:
        yield found


def test_a_key_is_asked_for(locked):
    assert locked.post(TEXT, GOOD[TEXT], Authorization=f"Bearer {KEY}")[0] == 200
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"},
                  {"Authorization": "Bearer "}, {"Authorization": "Bearer \xe9"}):  # fmt: skip
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", LOAD), ("GET", "/v1/nothing")):
            status, body = locked.send(method, path, b"", given)
            assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
    assert locked.send("GET", "/health")[0] == locked.send("GET", "/")[0] == 200
    assert locked.send("GET", "/health", headers={"Host": "my.server"})[0] == 200


def test_adapters_are_not_loaded_over_a_network_without_a_key(llm):
    with served(llm, {}, Sizes(cache=512), host="0.0.0.0", may_load=False) as open_site:
        for path in (LOAD, UNLOAD):
            status, body = open_site.post(path, GOOD[path])
            assert status == 403 and "--api-key" in body["error"]["message"]


def test_nothing_was_logged_as_a_bug(site, caplog):
    with caplog.at_level(logging.ERROR):
        site.post(CHAT, b"{")
    assert not caplog.records
    site.idle()
