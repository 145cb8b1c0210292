"""Finding the files of a data set: a path, a folder, a glob, a built-in or a Hugging Face data set."""

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from lorawgpu.data.compressed import COMPRESSED
from lorawgpu.data.read_files import SUFFIXES, data_suffix
from lorawgpu.data.slices import parse_split
from lorawgpu.data.splits import Files, evaluation_files, files_of_split, listed_files, training_files
from lorawgpu.errors import UserError
from lorawgpu.files.hub import cached_data_set, explain_failure, was_reached
from lorawgpu.files.paths import expand

BUILTIN = "builtin:"
NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json")  # of the hub's libraries
ASSETS = Path(__file__).parent.parent / "assets"


Choice = Callable[[list[Path], Path], Files]  # among the files of a folder


def files_to_train(path: str, split: str | None = None) -> Files:
    """The files of a data set to train on; a folder or hub data set may hold other splits too. UserError as
    `find_files`."""
    return _asked(path, split, training_files)


def files_to_evaluate(path: str, split: str | None = None) -> Files:
    """The files of a data set to evaluate on. UserError as `find_files`."""
    return _asked(path, split, evaluation_files)


def _asked(path: str, split: str | None, default: Choice) -> Files:
    if split is None:
        return find_files(path, default)
    slices = parse_split(split)
    found = {
        name: find_files(path, partial(files_of_split, split=name), partial(listed_files, path=path, split=name)).used
        for name in dict.fromkeys(part.split for part in slices)
    }
    used = dict.fromkeys(file for files in found.values() for file in files)
    return Files(list(used), parts=tuple((part, tuple(found[part.split])) for part in slices))


def find_files(
    path: str, choose: Choice = lambda files, folder: Files(files), listed: Callable[[list[Path]], Files] = Files
) -> Files:
    """The files of a path, a folder (searched recursively), a glob, `builtin:NAME` or a hub data set; sorted.

    `choose`: among the files of a folder or hub data set; `listed`: among those of a file name or glob. UserError if
    there are none, or if the file's suffix is not one that can be read.
    """
    if path.startswith(BUILTIN):
        return listed([_built_in(path.removeprefix(BUILTIN))])
    local = expand(path)
    if local.is_file():
        data_suffix(local)
        return listed([local])
    if local.is_dir():
        return choose(_readable(_visible(local), path, "folder"), local)
    if glob.has_magic(str(local)):
        return listed(_readable(map(Path, glob.glob(str(local), recursive=True)), path, "pattern"))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.endswith(SUFFIXES + COMPRESSED) and path[0] != ".":
        return _from_hub(path, choose)
    raise UserError(f"data set {path}: no such file or folder")


def _visible(folder: Path) -> Iterator[Path]:
    """What is in a folder, without hidden files and folders: those of git, of editors, of the hub's client."""
    return (p for p in folder.rglob("*") if not any(part[0] == "." for part in p.relative_to(folder).parts))


def _readable(paths: Iterator[Path], name: str, what: str) -> list[Path]:
    files = sorted(p for p in paths if p.is_file() and p.name.lower().endswith(_ENDINGS) and p.name not in NO_DATA)
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


def _from_hub(name: str, choose: Choice) -> Files:
    """Download the chosen files of a hub data set; without a network, those that are in the hub's cache."""
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
        names = sorted(n for n in names if n.lower().endswith(_ENDINGS) and n not in NO_DATA)
        chosen = choose([Path(n) for n in names], Path()) if names else Files([])

        def fetched(files: Iterable[Path]) -> list[Path]:
            return [Path(huggingface_hub.hf_hub_download(name, f.as_posix(), repo_type="dataset")) for f in files]

        files = Files(fetched(chosen.used), tuple(fetched(chosen.held_out)), chosen.unread)
    except UserError as error:
        raise UserError(f"data set {name}, on the hub: {str(error).removeprefix('data set .: ')}") from None
    except Exception as error:  # the client has dozens of error types: no network, no such name, no permission
        if not was_reached(error) and (folder := cached_data_set(name)):
            return choose(_readable(_visible(folder), name, "folder"), folder)
        raise UserError(f"data set {name}: no such file or folder here, and {explain_failure(error)}") from None
    if not files.used:
        raise UserError(f"data set {name}: the hub repository has no files ending in {', '.join(SUFFIXES)}")
    return files
