"""Mistakes in data files and their records."""

import gzip
import json
from functools import partial

import pyarrow
from pyarrow import parquet
from tiny_tokenizer import backend

from lorawgpu.chat.builtin import BUILT_IN

from . import DENSE, copy_of, evaluate


def data(folder, content, name="d.jsonl"):
    """Evaluate a file of `content` (or written by it) with the dense model, which has no tokenizer."""
    path = folder / name
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return evaluate(folder, data=path)


def with_tokenizer(folder, content):
    """The same with a tokenizer and a chat template."""
    model = copy_of(DENSE, folder)
    (model / "tokenizer.json").write_text(backend().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": BUILT_IN["chatml"]}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "d.jsonl").write_text(content)
    return evaluate(folder, model, data=folder / "d.jsonl")


def with_template(folder, content, template):
    return [*with_tokenizer(folder, content), "--chat-template", template]


def line(**record):
    return partial(with_tokenizer, content=json.dumps(record) + "\n")


def turn(**keys):
    """A conversation with these keys in its second turn."""
    return line(messages=[{"role": "user", "content": "Hi"}, keys])


def table(path):
    parquet.write_table(pyarrow.table({"a": [1]}), path)


def made(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("")
    return evaluate(folder, data=folder / names[0].split("/")[0])


def endless(path):
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2] * (1 << 19)] * 20}), path, compression="zstd")


LINES = gzip.compress((b" " * 1023 + b"\n") * (20 << 10))
BOMB = gzip.compress(b"[" + b" " * (12 << 20))
FILES = {
    "no such data": (lambda t: evaluate(t, DENSE, data="none.jsonl"), "none.jsonl: no such file or folder"),
    "an empty folder": (partial(lambda t: made(t, "dir/readme")), "the folder contains no files ending in"),
    "a pattern of nothing": (lambda t: evaluate(t, data=f"{t}/*.jsonl"), "the pattern matches no files ending in"),
    "an unknown suffix": (partial(data, content="a", name="d.xml"), "unknown file format"),
    "an unknown built-in": (lambda t: evaluate(t, data="builtin:none"), "no built-in data set has that name"),
    "not a gzip": (partial(data, content="a", name="d.jsonl.gz"), "d.jsonl.gz: cannot be read: Not a gzipped"),
    "a truncated gzip": (partial(data, content=gzip.compress(b"{}" * 999)[:-9], name="d.jsonl.gz"), "cannot be read"),
    "a gzip bomb": (partial(data, content=BOMB, name="d.json.gz"), "expands more than 32-fold"),
    "a gzip of endless lines": (partial(data, content=LINES, name="d.jsonl.gz"), "expands more than 200-fold"),
    "a Parquet of endless rows": (partial(data, content=endless, name="d.parquet"), "expands more than 200-fold"),
    "arguments of no variable": (lambda t: [*with_tokenizer(t, ""), "--chat-template-kwargs", "{enable_thinking: 0}"],
                                 "the chat template does not read a variable `enable_thinking`; it reads none"),
    "arguments of a list": (lambda t: [*evaluate(t), "--chat-template-kwargs", "[1]"], "wanted names and values"),
    "arguments that are not YAML": (lambda t: [*evaluate(t), "--chat-template-kwargs", "{"], "{: not valid YAML"),
    "a missing template": (lambda t: [*evaluate(t), "--chat-template", "none.jinja"], "chat template none.jinja:"),
    "not a zstd": (partial(data, content="a", name="d.jsonl.zst"), "d.jsonl.zst: cannot be read"),
    "not a Parquet": (partial(data, content="a", name="d.parquet"), "not a readable Parquet file"),
    "a Parquet with other columns": (partial(data, content=table, name="d.parquet"), "no known format"),
    "a CSV with an open quote": (partial(data, content='a,b\n"', name="d.csv"), "d.csv, line 2: not valid CSV"),
    "a CSV column twice": (partial(data, content="text,text\nx,y\n", name="d.csv"), "two columns are named 'text'"),
    "a CSV with semicolons": (partial(data, content="text;b\nx;y\n", name="d.csv"), "separated by ';' ('text;b')"),
    "a CSV row too short": (partial(data, content="text,b\nx\n", name="d.csv"), "line 2: 1 cells"),
    "an unfinished array": (partial(data, content='[{"input_ids": [1, 2]} 7', name="d.json"), "expected ',' or "),
    "an array that is not JSON": (partial(data, content="[{a}]", name="d.json"), "d.json, line 1: not valid JSON"),
    "an array that is not UTF-8": (partial(data, content=b"[\n\xff]", name="d.json"), "line 2: not valid UTF-8"),
    "a line that is not UTF-8": (partial(data, content=b'{"text": "\xff"}'), "line 1: not valid UTF-8 (byte 0xff"),
    "a line that is not JSON": (partial(data, content="\n{"), "line 2: not valid JSON"),
    "a line that is not an object": (partial(data, content="[1]"), "wanted a JSON object"),
    "a line too long": (partial(data, content=b'{"text": "' + b"a" * (17 << 20)), "longer than 16 MiB"),
    "no lines": (partial(data, content="\n\n"), "no readable records"),
}  # fmt: skip
RECORDS = {
    "keys of two types": (line(text="a", messages=[]), "the keys fit several formats (chat, text)"),
    "unknown keys": (line(question="a"), "no known format has these keys: `question`"),
    "keys that change": (partial(data, content='{"input_ids": [1, 2]}\n{"text": "a"}\n'), "line 2: a record of type p"),
    "messages of text": (line(messages="hi"), "`messages` must be a list, got str"),
    "no messages": (line(messages=[]), "`messages` is empty"),
    "a message of text": (line(messages=["hi"]), "messages[0] must be an object with `role` and `content`"),
    "a message of a stranger": (turn(**{"from": "narrator", "value": "a"}), "messages[1]: `from` must be one of"),
    "an unknown role": (turn(role="narrator", content="a"), "messages[1]: `role` must be one of system, develo"),
    "content of a number": (turn(role="user", content=7), "`content` must be a string, got int"),
    "no content": (turn(role="assistant"), "`content` must be a string, got nothing"),
    "content of a picture": (turn(role="user", content=[{"type": "image"}]), "only parts of type text are supported"),
    "content without parts": (turn(role="user", content=[]), "`content` is an empty list"),
    "a part without text": (turn(role="user", content=[{"type": "text"}]), "a part of type text needs a string"),
    "a weight of 3": (turn(role="assistant", content="a", weight=3), "`train` must be true or false"),
    "a conversation of text": (line(conversations=["a"]), "conversations[0] must be an object"),
    "an unknown speaker": (line(conversations=[{"from": "narrator", "value": "a"}]), "`from` must be one of"),
    "a speaker of a list": (line(conversations=[{"from": [], "value": "a"}]), "`from` must be one of"),
    "a role of a list": (turn(role=["user"], content="a"), "`role` must be one of"),
    "tools of a word": (line(messages=[{"role": "user", "content": "a"}], tools="{"), "`tools` is a string that is no"),
    "tool calls of a number": (turn(role="assistant", content="", tool_calls=3), "`tool_calls` must be a list"),
    "arguments that are not JSON": (
        partial(with_template, template="{{ messages[1].tool_calls | tojson }}", content=json.dumps({"messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]})),
        "line 1: the arguments of tool_calls[0] (f) are not JSON"),
    "tools of numbers": (line(messages=[{"role": "user", "content": "a"}], tools=[1]), "`tools` must be a list of obj"),
    "an instruction of a number": (line(instruction=1, output="a"), "`instruction` must be a string, got int"),
    "a prompt of a list": (line(prompt=[], completion="a"), "must be two strings or two lists of messages, got list a"),
    "a segment without a label": (line(segments=[{"text": "a"}]), "segments[0] must be an object with `label`"),
    "no text": (line(text=""), "`text` is empty"),
    "text of null": (line(text=None), "`text` must be a string, got nothing"),
    "ids of words": (line(input_ids=["a"]), "`input_ids[0]` must be an integer of at least 0, got 'a'"),
    "labels too few": (line(input_ids=[1, 2], labels=[1]), "differ in length: 2, 1 and 2"),
    "a label of -5": (line(input_ids=[1, 2], labels=[1, -5]), "`labels` contains -5"),
    "an id beyond the vocabulary": (line(input_ids=[1, 320]), "token id 320 is outside the model's vocabulary of 320"),
    "one token": (line(input_ids=[1]), "this record has no target tokens"),
}  # fmt: skip

CASES = FILES | RECORDS
