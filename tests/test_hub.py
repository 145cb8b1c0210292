"""Hub names, against a server on this machine that speaks the part of the hub's protocol we need."""

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


class Hub(BaseHTTPRequestHandler):
    """One repository, `acme/tiny`: a golden model and a file that must not be fetched."""

    files = {
        "config.json": (GOLDEN / "llama_dense" / "config.json").read_bytes(),
        "model.safetensors": (GOLDEN / "llama_dense" / "model.safetensors").read_bytes(),
        "pytorch_model.bin": b"not wanted",
        "damaged.gguf": b"no such thing",
    }

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", "acme", "tiny"]:
            listing = [{"type": "file", "path": name, "rfilename": name, "size": len(data), "oid": "0" * 40}
                       for name, data in self.files.items()]  # fmt: skip
            info = {"id": "acme/tiny", "sha": COMMIT, "private": False, "siblings": listing, "tags": []}
            return self.answer(json.dumps(listing if "tree" in parts else info).encode(), "application/json")
        if parts[:3] == ["acme", "tiny", "resolve"] and (data := self.files.get("/".join(parts[4:]))):
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
        self.send_header("X-Repo-Commit", COMMIT)
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
from lorawgpu.data.find_files import find_files
from lorawgpu.errors import UserError
from lorawgpu.weights.loader import open_checkpoint
try:
    if sys.argv[1] == "data":
        find_files("acme/set")
    checkpoint = open_checkpoint(sys.argv[1])
except UserError as error:
    sys.exit(f"USER: {error}")
names = sorted(path.name for path in checkpoint.path.iterdir())
print(checkpoint.name, names, checkpoint.dense("model.norm.weight").dtype)
"""


def open_in_child(name, endpoint, home, **more):
    """The library reads its settings at import, so each case has a process of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **more}
    return subprocess.run([sys.executable, "-c", CHILD, name], env=env, capture_output=True, text=True, timeout=120)


def test_a_hub_name_is_downloaded_once(endpoint, tmp_path):
    child = open_in_child("acme/tiny", endpoint, tmp_path)
    assert child.stdout.strip() == "acme/tiny ['config.json', 'model.safetensors'] bf16", child.stderr
    again = open_in_child("acme/tiny", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")
    assert again.stdout == child.stdout, again.stderr


def test_what_the_hub_refuses_is_a_clear_message(endpoint, tmp_path):
    for name in ("acme/absent", "acme/tiny/absent.gguf"):
        child = open_in_child(name, endpoint, tmp_path)
        assert child.returncode == 1
        assert f"USER: {name}: no such file or folder, and the hub" in child.stderr
        assert "Traceback" not in child.stderr


@pytest.mark.parametrize("more", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["nobody there", "offline"])
@pytest.mark.parametrize("name", ["acme/tiny", "acme/tiny/config.gguf", "data"])
def test_without_a_network_it_is_said_at_once_and_what_helps(tmp_path, name, more):
    """At once: the library tries some calls six times, with half a minute of its own lines."""
    begin = time.monotonic()
    child = open_in_child(name, "http://127.0.0.1:9", tmp_path, **more)
    assert time.monotonic() - begin < 15 and child.returncode == 1 and child.stderr.count("\n") == 1, child.stderr
    assert re.match(r"USER: .*the hub cannot be reached \(.*\): connect this machine, or fetch it", child.stderr)
    assert "Got:" not in child.stderr


def test_one_file_comes_from_the_cache_without_a_network(endpoint, tmp_path):
    fetched = open_in_child("acme/tiny/damaged.gguf", endpoint, tmp_path)
    again = open_in_child("acme/tiny/damaged.gguf", "http://127.0.0.1:9", tmp_path)
    assert "too short for a GGUF file" in fetched.stderr and again.stderr == fetched.stderr


@pytest.mark.parametrize(
    ("name", "is_one"),
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
def test_what_looks_like_a_hub_name(name, is_one):
    assert is_hub_name(name) == is_one
