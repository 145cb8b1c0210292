"""`ollama:NAME`: a model of Ollama's store, found by its manifest."""

import hashlib
import json
import shutil

import pytest
from golden_case import GOLDEN

from lorawgpu.config.source import find_path
from lorawgpu.errors import UserError
from lorawgpu.files import ollama
from lorawgpu.weights.loader import open_checkpoint

FILE = GOLDEN / "llama_q8_0" / "model.gguf"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with llama:1b, and a user's model of the same file, as `ollama pull` lays them out."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    digest = hashlib.sha256(FILE.read_bytes()).hexdigest()
    (tmp_path / "blobs").mkdir()
    shutil.copyfile(FILE, tmp_path / "blobs" / f"sha256-{digest}")
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"}
    model = {"mediaType": ollama.MODEL, "digest": f"sha256:{digest}", "size": FILE.stat().st_size}
    for place in ("registry.ollama.ai/library/llama/1b", "registry.ollama.ai/me/own/latest", "host:80/a/b/c"):
        path = tmp_path / "manifests" / place
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"schemaVersion": 2, "layers": [template, model]}))
    return tmp_path


@pytest.mark.parametrize("name", ["llama:1b", "me/own", "me/own:latest", "host:80/a/b:c"])
def test_a_pulled_model_is_opened_by_its_name(store, name):
    checkpoint = open_checkpoint(f"ollama:{name}")
    assert checkpoint.config == open_checkpoint(FILE).config and checkpoint.name == f"ollama:{name}"
    assert find_path(f"ollama:{name}", [store], True) == f"ollama:{name}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", "not in .*; get it with `ollama pull llama`"),
        ("none:1b", "get it with `ollama pull none:1b`"),
        ("../../etc/passwd", "wanted a name as Ollama spells it"),
        ("", "wanted a name as Ollama spells it"),
        ("a b", "wanted a name as Ollama spells it"),
    ],
)
def test_a_model_that_is_not_there_is_named(store, name, words):
    with pytest.raises(UserError, match=words):
        open_checkpoint(f"ollama:{name}")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "has 0 model layers"),
        ("x", "has 0 model layers"),
        ([{"mediaType": ollama.MODEL, "digest": "sha256:../x"}], "the digest of its model is"),
        ([{"mediaType": ollama.MODEL, "digest": f"sha256:{'1' * 64}"}], "no such file, though .* names it"),
        ([{"mediaType": ollama.ADAPTER}], "has an adapter already"),
    ],
)
def test_a_damaged_store_is_named(store, layers, words):
    (store / "manifests/registry.ollama.ai/library/llama/1b").write_text(json.dumps({"layers": layers}))
    with pytest.raises(UserError, match=words):
        open_checkpoint("ollama:llama:1b")
