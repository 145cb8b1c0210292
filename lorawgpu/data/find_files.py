"""Finding the files of a data set: a path, a folder, a glob, a built-in or a Hugging Face data set."""

import glob
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lorawgpu.data.compressed import COMPRESSED
from lorawgpu.data.read_files import SUFFIXES, data_suffix
from lorawgpu.data.splits import TRAIN, Files, evaluation_files, split_of, training_files
from lorawgpu.errors import UserError
from lorawgpu.files.hub import explain_failure
from lorawgpu.files.paths import expand

BUILTIN = "builtin:"
ASSETS = Path(__file__).parent.parent / "assets"


def files_to_train(path: str) -> Files:
    """The files of a data set to train on; a folder may hold other splits too. UserError as `find_files`."""
    return _of_split(path, training_files)


def files_to_evaluate(path: str) -> Files:
    """The files of a data set to evaluate on. UserError as `find_files`."""
    return _of_split(path, evaluation_files)


def _of_split(path: str, choose: Callable[[list[Path], Path], Files]) -> Files:
    files, folder = find_files(path), Path(path).expanduser()
    return choose(files, folder) if folder.is_dir() else Files(files)


def find_files(path: str) -> list[Path]:
    """The files of a path, a folder (searched recursively), a glob, `builtin:NAME` or a hub data set; sorted.

    UserError if there are none, or if the file's suffix is not one that can be read.
    """
    if path.startswith(BUILTIN):
        return [_built_in(path.removeprefix(BUILTIN))]
    local = expand(path)
    if local.is_file():
        data_suffix(local)
        return [local]
    if local.is_dir():
        return _readable(local.rglob("*"), path, "folder")
    if glob.has_magic(str(local)):
        return _readable(map(Path, glob.glob(str(local), recursive=True)), path, "pattern")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.endswith(SUFFIXES + COMPRESSED) and path[0] != ".":
        return _from_hub(path)
    raise UserError(f"data set {path}: no such file or folder")


def _readable(paths: Iterator[Path], name: str, what: str) -> list[Path]:
    files = sorted(p for p in paths if p.is_file() and p.name.lower().endswith(_ENDINGS))
    if not files:
        found_none = "contains no files" if what == "folder" else "matches no files"
        raise UserError(f"data set {name}: the {what} {found_none} ending in {', '.join(SUFFIXES)}")
    return files


_ENDINGS = SUFFIXES + tuple(s + c for s in SUFFIXES for c in COMPRESSED)


def _built_in(name: str) -> Path:
    file = ASSETS / f"{name}.jsonl"
    if not file.is_file():
        known = ", ".join(sorted(BUILTIN + f.stem for f in ASSETS.glob("*.jsonl"))) or "none"
        raise UserError(f"data set {BUILTIN}{name}: no built-in data set has that name; available: {known}")
    return file


def _from_hub(name: str) -> list[Path]:
    """Download the files of a hub data set: those of the training split, or all of them if it has none."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"data set {name}: no such file or folder; to download it from the Hugging Face hub: "
            "pip install huggingface_hub"
        ) from None
    try:
        hub = huggingface_hub.HfApi()
        hub.repo_info(name, repo_type="dataset")  # fails at once, where listing the files would retry six times
        names = hub.list_repo_files(name, repo_type="dataset")
        names = sorted(n for n in names if n.lower().endswith(_ENDINGS))
        names = [n for n in names if split_of(PurePosixPath(n)) == TRAIN] or names
        files = [Path(huggingface_hub.hf_hub_download(name, n, repo_type="dataset")) for n in names]
    except Exception as error:  # the client has dozens of error types: no network, no such name, no permission
        raise UserError(f"data set {name}: no such file or folder here, and {explain_failure(error)}") from None
    if not files:
        raise UserError(f"data set {name}: the hub repository has no files ending in {', '.join(SUFFIXES)}")
    return files
