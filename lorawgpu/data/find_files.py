"""The data files that a config names: a path, a folder, a glob, a built-in or a hub data set."""

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from lorawgpu.data.compressed import COMPRESSED
from lorawgpu.data.read_files import SUFFIXES, kind_of
from lorawgpu.errors import UserError
from lorawgpu.files.hub import why_not

BUILTIN = "builtin:"
ASSETS = Path(__file__).parent.parent / "assets"


def find_files(path: str) -> list[Path]:
    """Files named by a path, a folder (searched through), a glob, `builtin:NAME`, or a hub data set; sorted.

    UserError when nothing is there, or when a name ends in nothing that can be read.
    """
    if path.startswith(BUILTIN):
        return [_built_in(path.removeprefix(BUILTIN))]
    place = Path(path).expanduser()
    if place.is_file():
        kind_of(place)
        return [place]
    if place.is_dir():
        return _readable(place.rglob("*"), path, "folder")
    if glob.has_magic(str(place)):
        return _readable(map(Path, glob.glob(str(place), recursive=True)), path, "pattern")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.endswith(SUFFIXES + COMPRESSED) and path[0] != ".":
        return _from_hub(path)
    raise UserError(f"data set {path}: there is no such file or folder")


def _readable(paths: Iterator[Path], name: str, what: str) -> list[Path]:
    files = sorted(p for p in paths if p.is_file() and p.name.lower().endswith(_ENDINGS))
    if not files:
        raise UserError(f"data set {name}: the {what} holds no file ending in {', '.join(SUFFIXES)}")
    return files


_ENDINGS = SUFFIXES + tuple(s + c for s in SUFFIXES for c in COMPRESSED)


def _built_in(name: str) -> Path:
    file = ASSETS / f"{name}.jsonl"
    if not file.is_file():
        known = ", ".join(sorted(BUILTIN + f.stem for f in ASSETS.glob("*.jsonl"))) or "none"
        raise UserError(f"data set {BUILTIN}{name}: there is no built-in data set of this name; there are: {known}")
    return file


def _from_hub(name: str) -> list[Path]:
    """Download the data files of a hub data set: those that say `train` in their path, or all when none does."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"data set {name}: there is no such file or folder; to look on the Hugging Face hub, "
            "pip install 'lorawgpu[hub]'"
        ) from None
    try:
        hub = huggingface_hub.HfApi()
        hub.repo_info(name, repo_type="dataset")  # fails at once where the listing would try six times
        names = hub.list_repo_files(name, repo_type="dataset")
        names = sorted(n for n in names if n.lower().endswith(_ENDINGS))
        names = [n for n in names if "train" in n.lower()] or names
        files = [Path(huggingface_hub.hf_hub_download(name, n, repo_type="dataset")) for n in names]
    except Exception as error:  # the client raises dozens of types: no network, no such name, no permission
        raise UserError(f"data set {name}: there is no such file or folder here, and {why_not(error)}") from None
    if not files:
        raise UserError(f"data set {name}: the hub repository holds no file ending in {', '.join(SUFFIXES)}")
    return files
