"""Open a model by what the user wrote: a Hugging Face folder, a `.gguf` file, or a hub name."""

from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.model.hf_folder import HfFolder
from lorawgpu.model.tensors import Checkpoint, Dense, Ternary

__all__ = ["Checkpoint", "Dense", "Ternary", "open_checkpoint"]

BUILTIN = "builtin:"


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint that `model` names; headers are checked, no weight is read yet.

    Raises UserError when it cannot be found, is damaged, or is of a kind that is not supported.
    """
    name = str(model)
    if name.startswith(BUILTIN):
        return open_builtin(name.removeprefix(BUILTIN))
    path = Path(name).expanduser()
    if path.is_dir():
        return HfFolder(path, name)
    raise UserError(f"{name}: no such model folder or .gguf file.")


def open_builtin(name: str) -> Checkpoint:
    """The one place where built-in models will be looked up; there is none yet."""
    raise UserError(f"builtin:{name}: there is no built-in model of this name.")
