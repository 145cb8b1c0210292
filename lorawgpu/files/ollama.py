"""Models that Ollama has pulled: its store keeps GGUF files under their digests, and a manifest for each name.

`manifests/<host>/<namespace>/<model>/<tag>` is JSON whose layers name blobs, `blobs/sha256-<hex>`.
Layout: https://github.com/ollama/ollama (server/manifest.go)
"""

import os
import re
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.paths import expand
from lorawgpu.files.untrusted import brief, read_json_object

PREFIX = "ollama:"
MODEL, ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_NAME = re.compile(r"((?P<host>[\w.-]+(:\d+)?)/)??((?P<space>[\w.-]+)/)?(?P<model>[\w.-]+)(:(?P<tag>[\w.-]+))?")
_DIGEST = re.compile(r"sha256[:-][0-9a-f]{64}")


def stores() -> list[Path]:
    """The folders where Ollama keeps models: $OLLAMA_MODELS, the user's, and that of its Linux service."""
    chosen = os.environ.get("OLLAMA_MODELS")
    return [expand(chosen)] if chosen else [expand("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models")]


def find_model(name: str) -> Path:
    """The GGUF file of `name` ("llama3.2", "llama3.2:1b", "user/model:tag"). UserError if Ollama does not have it."""
    match = _NAME.fullmatch(name)
    if not match or ".." in name:
        raise UserError(f"{PREFIX}{brief(name)}: wanted a name as Ollama spells it, such as {PREFIX}llama3.2:1b")
    tag = match["tag"] or "latest"
    place = Path(match["host"] or "registry.ollama.ai", match["space"] or "library", match["model"], tag)
    manifests = [(store, store / "manifests" / place) for store in stores()]
    found = next(((store, path) for store, path in manifests if path.is_file()), None)
    if found is None:
        looked = " or ".join(str(store) for store in stores())
        raise UserError(f"{PREFIX}{name}: not in {looked}; get it with `ollama pull {name}`, or see `ollama list`")
    return _blob(*found)


def _blob(store: Path, manifest: Path) -> Path:
    layers = read_json_object(manifest).get("layers")
    layers = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    if any(layer.get("mediaType") == ADAPTER for layer in layers):
        raise UserError(f"{manifest}: this model has an adapter already; name the model it was made from")
    models = [layer for layer in layers if layer.get("mediaType") == MODEL]
    if len(models) != 1:
        raise UserError(f"{manifest}: has {len(models)} model layers; wanted 1, a single GGUF file")
    digest = models[0].get("digest")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise UserError(f"{manifest}: the digest of its model is {brief(digest)}; wanted sha256 and 64 digits")
    blob = store / "blobs" / digest.replace(":", "-")
    if not blob.is_file():
        raise UserError(f"{blob}: no such file, though {manifest} names it; pull the model again")
    return blob
