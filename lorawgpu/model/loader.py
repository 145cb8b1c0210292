"""Open a model by what the user wrote: a Hugging Face folder, a `.gguf` file, or a hub name."""

from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.model.gguf_checkpoint import GgufCheckpoint
from lorawgpu.model.hf_folder import HfFolder
from lorawgpu.model.hub import download, is_hub_name
from lorawgpu.model.tensors import Checkpoint, Dense, Ternary

__all__ = ["Checkpoint", "Dense", "Ternary", "open_checkpoint"]

BUILTIN = "builtin:"
ASSETS = Path(__file__).parent.parent / "assets"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint that `model` names; headers are checked, no weight is read yet.

    A path that exists wins over a hub name (`owner/model`, or `owner/model/file.gguf`). Raises UserError when
    it cannot be found, is damaged, or is of a kind that is not supported.
    """
    name = str(model)
    if name.startswith(BUILTIN):
        return open_builtin(name.removeprefix(BUILTIN))
    path = Path(name).expanduser()
    if not path.exists() and is_hub_name(name):
        path = download(name)
    return open_path(path, name)


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
