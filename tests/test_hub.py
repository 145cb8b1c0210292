"""Hub names, against a local server that speaks the part of the hub's protocol that we need."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lorawgpu.files.hub import is_hub_name

GOLDEN = Path(__file__).parent / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD = COMMIT[::-1]  # of the revision v1 of acme/chats


class Hub(BaseHTTPRequestHandler):
    """`acme/tiny`: a golden model and a file that must not be fetched; the data set `acme/chats`."""

    files = {
        "config.json": (GOLDEN / "llama_dense" / "config.json").read_bytes(),
        "model.safetensors": (GOLDEN / "llama_dense" / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"not wanted",
        "damaged.gguf": b"no such thing",
    }

    chats = {"README.md": b"", "data/train-0.jsonl": b"{}\n", "data/test-0.jsonl": b"{}\n"}
    card = b"""---
configs:
- config_name: hard
  data_files:
  - {split: dev, path: b/*}
  - {split: train, path: a/**}
---
"""
    old = {"README.md": card} | dict.fromkeys(("a/x/1.jsonl", "a/2.jsonl", "b/3.jsonl", "easy/4.jsonl"), b"{}\n")

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        known = (("acme/tiny", "models", self.files), ("acme/chats", "datasets", self.chats))
        if "v1" in parts or OLD in parts:  # a revision
            known = (("acme/chats", "datasets", self.old),)
        for name, api, files in known:
            if parts[:4] == ["api", api, *name.split("/")]:
                listing = [{"type": "file", "path": file, "rfilename": file, "size": len(data), "oid": "0" * 40}
                           for file, data in files.items()]  # fmt: skip
                info = {
                    "id": name,
                    "sha": OLD if files is self.old else COMMIT,
                    "private": False,
                    "siblings": listing,
                    "tags": [],
                }
                return self.answer(json.dumps(listing if "tree" in parts else info).encode(), "application/json")
            path = parts[1:] if api == "datasets" else parts
            if path[:3] == [*name.split("/"), "resolve"] and (data := files.get("/".join(path[4:]))) is not None:
                return self.answer(data, "application/octet-stream")
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def answer(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", OLD if "/v1/" in self.path or OLD in self.path else COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


CHILD = """
import sys
from lorawgpu.data.configurations import Within
from lorawgpu.data.find_files import files_to_train, find_files
from lorawgpu.errors import UserError
from lorawgpu.weights.loader import open_checkpoint
try:
    if sys.argv[1] == "data":
        find_files("acme/set")
    if sys.argv[1] == "chats":
        sys.exit(str([path.name for path in files_to_train("acme/chats").used]))
    if sys.argv[1].startswith("v1"):
        _, name, split, *data_files = sys.argv[1].split()
        within = Within(None if name == "-" else name, "v1", tuple(data_files))
        files = files_to_train("acme/chats", None if split == "-" else split, within).used
        sys.exit(str([path.name for path in files]))
    checkpoint = open_checkpoint(sys.argv[1])
except UserError as error:
    sys.exit(f"USER: {error}")
names = sorted(path.name for path in checkpoint.path.iterdir())
print(checkpoint.name, names, checkpoint.dense("model.norm.weight").dtype)
"""


def open_in_child(name, endpoint, home, **more):
    """The library reads its settings at import, so each case needs its own process."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    return subprocess.run([sys.executable, "-c", CHILD, name], env=env, capture_output=True, text=True, timeout=120)


def test_a_hub_name_is_downloaded_once(endpoint, tmp_path):
    child = open_in_child("acme/tiny", endpoint, tmp_path)
    assert child.stdout.strip() == "acme/tiny ['config.json', 'model.safetensors'] bf16", child.stderr
    again = open_in_child("acme/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == child.stdout, again.stderr


def test_a_name_unknown_to_the_hub_is_a_clear_message(endpoint, tmp_path):
    for name in ("acme/absent", "acme/tiny/absent.gguf"):
        child = open_in_child(name, endpoint, tmp_path)
        assert child.returncode == 1
        assert f"USER: {name}: no such file or folder, and the Hugging Face hub says" in child.stderr
        assert "Traceback" not in child.stderr


@pytest.mark.parametrize("more", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["nobody there", "offline"])
@pytest.mark.parametrize("name", ["acme/tiny", "acme/tiny/config.gguf", "data"])
def test_without_a_network_the_message_comes_at_once_and_says_what_to_do(tmp_path, name, more):
    """The library retries some calls six times, with half a minute of log lines."""
    begin = time.monotonic()
    child = open_in_child(name, "http://127.0.0.1:9", tmp_path, **more)
    assert time.monotonic() - begin < 15 and child.returncode == 1 and child.stderr.count("\n") == 1, child.stderr
    assert re.match(r"USER: .*hub cannot be reached \(.*\): go online, or download it", child.stderr)
    assert "Got:" not in child.stderr


def test_one_file_comes_from_the_cache_without_a_network(endpoint, tmp_path):
    fetched = open_in_child("acme/tiny/damaged.gguf", endpoint, tmp_path)
    again = open_in_child("acme/tiny/damaged.gguf", "http://127.0.0.1:9", tmp_path)
    assert "too short for a GGUF file" in fetched.stderr and again.stderr == fetched.stderr


def test_a_data_set_comes_from_the_cache_without_a_network(endpoint, tmp_path):
    fetched = open_in_child("chats", endpoint, tmp_path)
    assert fetched.stderr.strip() == "['train-0.jsonl']"
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert open_in_child("chats", "http://127.0.0.1:9", tmp_path, **more).stderr == fetched.stderr


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("v1 hard -", "['2.jsonl', '1.jsonl']"),
        ("v1 hard validation", "['3.jsonl']"),
        ("v1 easy -", "['4.jsonl']"),
        ("v1 - - a/*.jsonl easy/4.jsonl", "['2.jsonl', '4.jsonl']"),
        ("v1 none -", "acme/chats, on the hub: no files of the configuration (name) none; it has hard"),
    ],
)
def test_a_configuration_and_files_of_a_revision_of_a_data_set(endpoint, tmp_path, asked, words):
    fetched = open_in_child(asked, endpoint, tmp_path)
    assert words in fetched.stderr
    if words[0] == "[":
        again = open_in_child(asked, "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
        assert again.stderr == fetched.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("microsoft/bitnet-b1.58-2B-4T", True),
        ("acme/tiny/weights/m.gguf", True),
        ("gpt2", False),
        ("../models/tiny", False),
        ("/models/tiny", False),
        ("a/b/c", False),
        ("models/../tiny", False),
    ],
)
def test_what_looks_like_a_hub_name(name, expected):
    assert is_hub_name(name) == expected
