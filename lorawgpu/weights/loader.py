"""Open a model by what the user wrote: a Hugging Face folder, a `.gguf` file, or a hub name."""

from pathlib import Path
from urllib.parse import urlsplit

from lorawgpu.errors import UserError
from lorawgpu.files.hub import download, is_hub_name
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.hf_folder import HfFolder
from lorawgpu.weights.tensors import Checkpoint, Dense, Ternary

__all__ = ["Checkpoint", "Dense", "Ternary", "open_checkpoint"]

BUILTIN = "builtin:"
HUB_HOSTS = ("huggingface.co/", "hf.co/")
ASSETS = Path(__file__).parent.parent / "assets"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint that `model` names; headers are checked, no weight is read yet.

    A path that exists wins over a hub name (`owner/model`, or `owner/model/file.gguf`). Raises UserError when
    it cannot be found, is damaged, or is of a kind that is not supported.
    """
    name = str(model)
    if not name.strip():
        raise UserError("the model's name is empty; wanted a model folder, a .gguf file or a hub name.")
    if "://" in name or name.startswith(HUB_HOSTS):
        raise UserError(f"{name}: addresses are not fetched{_hub_name_in(name)}.")
    if name.startswith(BUILTIN):
        return open_builtin(name.removeprefix(BUILTIN))
    path = Path(name).expanduser()
    if not path.exists() and is_hub_name(name):
        path = download(name)
    return open_path(path, name)


def _hub_name_in(address: str) -> str:
    """What to write instead, for a page of the hub: its owner/name, and the GGUF where it is of one."""
    parts = urlsplit(address if "://" in address else f"https://{address}").path.strip("/").split("/")
    if len(parts) > 4 and parts[2] in ("blob", "resolve") and parts[-1].endswith(".gguf"):
        name = "/".join([*parts[:2], *parts[4:]])  # owner, name, blob, revision, file
    else:
        name = "/".join(parts[:2])
    if is_hub_name(name):
        return f"; of a page of the Hugging Face hub give owner/name: {name}"
    return "; wanted a model folder, a .gguf file or a hub name (owner/name)"


def open_path(path: Path, name: str) -> Checkpoint:
    """The checkpoint in an existing folder or `.gguf` file."""
    if path.is_dir():
        return HfFolder(path, name)
    if not path.is_file():
        raise UserError(f"{name}: no such file or folder; wanted a model folder, a .gguf file or a hub name.")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path, name)
    raise UserError(f"{name}: wanted a model folder or a .gguf file; for safetensors name the folder they are in.")


def open_builtin(name: str) -> Checkpoint:
    """A model that came with the package: a folder of `assets`. UserError naming those there are."""
    known = sorted(config.parent.name for config in ASSETS.glob("*/config.json"))
    if name not in known:
        there_are = ", ".join(BUILTIN + folder for folder in known)
        raise UserError(f"{BUILTIN}{name}: there is no built-in model of this name; there are: {there_are}")
    return HfFolder(ASSETS / name, f"{BUILTIN}{name}")
