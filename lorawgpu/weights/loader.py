"""Opening the model that a user names: a Hugging Face folder, a `.gguf` file, a built-in or a hub name."""

import math
import sys
from pathlib import Path
from urllib.parse import urlsplit

from lorawgpu.errors import UserError
from lorawgpu.files import ollama
from lorawgpu.files.hub import GGUF_ON_HUB, download, is_hub_name
from lorawgpu.files.kinds import why_no_file
from lorawgpu.files.paths import expand
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.hf_folder import HfFolder
from lorawgpu.weights.options import I2_S_LAYOUT, ModelOptions
from lorawgpu.weights.tensors import Checkpoint, Dense, Ternary, expected_tensors

__all__ = ["Checkpoint", "Dense", "Ternary", "open_checkpoint"]

BUILTIN = "builtin:"
HUB_HOSTS = ("huggingface.co/", "hf.co/")
ASSETS = Path(__file__).parent.parent / "assets"


def open_checkpoint(
    model: str | Path, options: ModelOptions | None = None, kept: ModelOptions | None = None
) -> Checkpoint:
    """The checkpoint that `model` names. Checks headers, reads no weights.

    An existing path wins over a hub name (`owner/model` or `owner/model/file.gguf`). options: what the user says about
    the model; kept: what was said when an adapter was trained, possibly on another file of the same model. UserError if
    it is not found, damaged or not supported, or if it leaves an option no choice.
    """
    options = options or {}
    checkpoint = _open(model, {**(kept or {}), **options})
    if I2_S_LAYOUT in options and not checkpoint.has_i2_s:
        raise UserError(f"{model}: {I2_S_LAYOUT} is set, but no tensor is of type i2_s; remove it.")
    return checkpoint


def _open(model: str | Path, options: ModelOptions) -> Checkpoint:
    name = str(model)
    if not name.strip():
        raise UserError("the model's name is empty; wanted a model folder, a .gguf file or a hub name.")
    if "://" in name or name.startswith(HUB_HOSTS):
        raise UserError(f"{name}: {_instead_of(name)}.")
    if name.startswith(BUILTIN):
        return open_builtin(name.removeprefix(BUILTIN), options)
    if name.startswith(ollama.PREFIX):
        return _open_gguf(ollama.find_model(name.removeprefix(ollama.PREFIX)), name, options)
    path = expand(name)
    if not path.exists() and is_hub_name(name):
        if name.endswith(".gguf") and name.count("/") == 1:
            raise UserError(f"{name}: no such file. {GGUF_ON_HUB}.")
        path = download(name)
    return open_path(path, name, options)


def _instead_of(address: str) -> str:
    """What to use instead of a URL: for one of the hub its repo id, with the GGUF file if it points to one."""
    parts = urlsplit(address if "://" in address else f"https://{address}").path.strip("/").split("/")
    if len(parts) > 4 and parts[2] in ("blob", "resolve") and parts[-1].endswith(".gguf"):
        name = "/".join([*parts[:2], *parts[4:]])  # owner, name, blob, revision, file
    else:
        name = "/".join(parts[:2])
    if is_hub_name(name):
        return f"that is a Hugging Face URL; use the repo id instead: {name}"
    return "URLs are not supported; wanted a model folder, a .gguf file or a hub name (owner/name)"


def _open_gguf(path: Path, name: str, options: ModelOptions) -> Checkpoint:
    checkpoint = GgufCheckpoint(path, name, options)
    note_widened(checkpoint)
    note_splits(checkpoint)
    return checkpoint


def open_path(path: Path, name: str, options: ModelOptions) -> Checkpoint:
    """The checkpoint in an existing folder or `.gguf` file."""
    if path.is_dir():
        checkpoint = HfFolder(path, name, options)
        note_unused(checkpoint)
        note_untied(checkpoint)
        note_widened(checkpoint)
        return checkpoint
    if not path.is_file():
        why = why_no_file(path, "no such file or folder")
        raise UserError(f"{name}: {why}; wanted a model folder, a .gguf file or a hub name.")
    if path.suffix == ".gguf":
        return _open_gguf(path, name, options)
    raise UserError(f"{name}: wanted a model folder or a .gguf file; for safetensors, name the folder they are in.")


def note_unused(checkpoint: HfFolder) -> None:
    """Print a note on stderr for a multimodal model: only its text part is read."""
    if others := checkpoint.outside():
        parts = ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in others}))
        print(
            f"note: {checkpoint.name}: {len(others)} tensors ({parts}) are not read; only text is trained",
            file=sys.stderr,
        )


def note_untied(checkpoint: HfFolder) -> None:
    """Print a note on stderr if the files contradict the config about the head."""
    if checkpoint.untied:
        print(
            f"note: {checkpoint.name}: config.json says tie_word_embeddings: true, but lm_head.weight differs from the "
            "embedding; as in transformers 5 the two are not tied",
            file=sys.stderr,
        )


def note_widened(checkpoint: GgufCheckpoint | HfFolder) -> None:
    """Print a note on stderr for tensors that become float32: what they are, and their memory."""
    shapes = expected_tensors(checkpoint.config)
    for kind, names in checkpoint.widened().items():
        size = sum(4 * math.prod(shapes[name]) for name in names) / 2**30
        what = f"{len(names)} tensors of {kind} become" if len(names) > 1 else f"{names[0]} of {kind} becomes"
        print(f"note: {checkpoint.name}: {what} float32, {size:.3g} GiB", file=sys.stderr)


def note_splits(checkpoint: GgufCheckpoint) -> None:
    """Print a note on stderr for a tokenizer that a file describes only in part."""
    if checkpoint.unknown_splits:
        print(
            f"note: {checkpoint.name}: no tokenizer.ggml.pre, so text is split by llama.cpp's default, as few "
            "models were trained: convert the model again, or use its Hugging Face folder",
            file=sys.stderr,
        )


def open_builtin(name: str, options: ModelOptions) -> Checkpoint:
    """A model that comes with the package: a folder of `assets`. UserError, naming the available ones, if unknown."""
    known = sorted(config.parent.name for config in ASSETS.glob("*/config.json"))
    if name not in known:
        available = ", ".join(BUILTIN + folder for folder in known)
        raise UserError(f"{BUILTIN}{name}: no built-in model has that name; available: {available}")
    return HfFolder(ASSETS / name, f"{BUILTIN}{name}", options)
