"""Finding the files of a data set: a path, a folder, a glob, a built-in or a Hugging Face data set."""

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from lorawgpu.data.compressed import COMPRESSED
from lorawgpu.data.configurations import CARD, MAX_CARD, Within, narrowed
from lorawgpu.data.read_files import SUFFIXES, data_suffix
from lorawgpu.data.slices import parse_split
from lorawgpu.data.splits import (
    TEST,
    TRAIN,
    VALIDATION,
    Files,
    evaluation_files,
    files_of_split,
    listed_files,
    training_files,
)
from lorawgpu.errors import UserError
from lorawgpu.files.hub import cached_data_set, explain_failure, was_reached
from lorawgpu.files.kinds import why_no_file
from lorawgpu.files.paths import expand
from lorawgpu.files.untrusted import read_text_if_regular

BUILTIN = "builtin:"
NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json")  # of the hub's libraries
ASSETS = Path(__file__).parent.parent / "assets"
WHOLE = Within()

Choice = Callable[[list[Path], Path], Files]  # among the files of a folder


def files_to_train(path: str, split: str | None = None, within: Within = WHOLE) -> Files:
    """The files of a data set to train on; a folder or hub data set may hold other splits too. UserError as
    `find_files`."""
    return _asked(path, split, within, training_files, (TRAIN,))


def files_to_evaluate(path: str, split: str | None = None, within: Within = WHOLE) -> Files:
    """The files of a data set to evaluate on. UserError as `find_files`."""
    return _asked(path, split, within, evaluation_files, (VALIDATION, TEST))


def _asked(path: str, split: str | None, within: Within, default: Choice, default_splits: tuple[str, ...]) -> Files:
    if split is None:
        return find_files(path, default, within=within, splits=default_splits)
    slices = parse_split(split)
    found = {
        name: find_files(
            path, partial(files_of_split, split=name), partial(listed_files, path=path, split=name), within, (name,)
        ).used
        for name in dict.fromkeys(part.split for part in slices)
    }
    used = dict.fromkeys(file for files in found.values() for file in files)
    return Files(list(used), parts=tuple((part, tuple(found[part.split])) for part in slices))


def find_files(
    path: str,
    choose: Choice = lambda files, folder: Files(files),
    listed: Callable[[list[Path]], Files] = Files,
    within: Within = WHOLE,
    splits: tuple[str, ...] = (TRAIN,),
) -> Files:
    """The files of a path, a folder (searched recursively), a glob, `builtin:NAME` or a hub data set; sorted.

    `choose`: among the files of a folder or hub data set; `listed`: among those that are named, or that match a glob;
    `splits`: the same where a configuration says the splits. UserError if there are none, or if the file's suffix is
    not one that can be read.
    """

    def chosen(files: list[Path], folder: Path, card: Callable[[], str]) -> Files:
        files, of_split = narrowed(files, folder, within, splits, card)
        return of_split or (listed(files) if within.data_files else choose(files, folder))

    local = expand(path)
    if _is_hub_name(path) and not local.exists():
        return _from_hub(path, within, chosen)
    if local.is_dir() and not within.revision:
        return _of_folder(local, path, chosen, within)
    if keys := within.keys():
        of = "of the hub" if local.is_dir() else "that is a folder or of the hub"
        raise UserError(f"data set {path}: {', '.join(keys)}: only for a data set {of}; remove it")
    if path.startswith(BUILTIN):
        return listed([_built_in(path.removeprefix(BUILTIN))])
    if local.is_file():
        _check_kind(local, within)
        return listed([local])
    if glob.has_magic(str(local)):
        return listed(_readable(map(Path, glob.glob(str(local), recursive=True)), path, "pattern", within))
    raise UserError(f"data set {path}: {why_no_file(local, 'no such file or folder')}")


def _is_hub_name(path: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not path.endswith(SUFFIXES + COMPRESSED) and path[0] != "."


def _check_kind(file: Path, within: Within) -> None:
    """UserError for a file whose name does not say that it is of a kind that can be read, or that is asked for."""
    if within.ds_type and data_suffix(file) not in within.suffixes:
        wanted = " or ".join(within.suffixes)
        raise UserError(
            f"data set {file}: ds_type {within.ds_type}: wanted a name ending in {wanted}; remove ds_type, or rename it"
        )
    data_suffix(file)


def _of_folder(
    folder: Path, name: str, chosen: Callable[[list[Path], Path, Callable[[], str]], Files], within: Within
) -> Files:
    def card() -> str:
        return read_text_if_regular(folder / CARD, MAX_CARD)

    return chosen(_readable(_visible(folder), name, "folder", within), folder, card)


def _visible(folder: Path) -> Iterator[Path]:
    """What is in a folder, without hidden files and folders: those of git, of editors, of the hub's client."""
    return (p for p in folder.rglob("*") if not any(part[0] == "." for part in p.relative_to(folder).parts))


def _readable(paths: Iterator[Path], name: str, what: str, within: Within) -> list[Path]:
    files = sorted(p for p in paths if p.is_file() and _is_data(p.name, within))
    if not files:
        found_none = "contains no files" if what == "folder" else "matches no files"
        raise UserError(f"data set {name}: the {what} {found_none} ending in {', '.join(within.suffixes)}")
    return files


def _is_data(name: str, within: Within) -> bool:
    endings = tuple(s + c for s in within.suffixes for c in ("", *COMPRESSED))
    return name.lower().endswith(endings) and name not in NO_DATA


def _built_in(name: str) -> Path:
    file = ASSETS / f"{name}.jsonl"
    if not file.is_file():
        known = ", ".join(sorted(BUILTIN + f.stem for f in ASSETS.glob("*.jsonl"))) or "none"
        raise UserError(f"data set {BUILTIN}{name}: no built-in data set has that name; available: {known}")
    return file


def _from_hub(name: str, within: Within, chosen_of: Callable[[list[Path], Path, Callable[[], str]], Files]) -> Files:
    """Download the chosen files of a hub data set; without a network, those that are in the hub's cache."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"data set {name}: no such file or folder; to download it from the Hugging Face hub: "
            "pip install huggingface_hub"
        ) from None
    where = {"repo_type": "dataset"} | ({"revision": within.revision} if within.revision else {})

    def fetched(files: Iterable[Path]) -> list[Path]:
        return [Path(huggingface_hub.hf_hub_download(name, f.as_posix(), **where)) for f in files]

    try:
        hub = huggingface_hub.HfApi()
        hub.repo_info(name, **where)  # fails at once, where listing the files would retry six times
        all_names = hub.list_repo_files(name, **where)
        names = sorted(n for n in all_names if _is_data(n, within))

        def card() -> str:
            return fetched([Path(CARD)])[0].read_text("utf-8", "replace") if CARD in all_names else ""

        chosen = chosen_of([Path(n) for n in names], Path(), card) if names else Files([])
        files = Files(fetched(chosen.used), tuple(fetched(chosen.held_out)), chosen.unread)
    except UserError as error:
        raise UserError(f"data set {name}, on the hub: {str(error).removeprefix('data set .: ')}") from None
    except Exception as error:  # the client has dozens of error types: no network, no such name, no permission
        if not was_reached(error) and (folder := cached_data_set(name, within.revision)):
            return _of_folder(folder, name, chosen_of, within)
        raise UserError(f"data set {name}: no such file or folder here, and {explain_failure(error)}") from None
    if not files.used:
        raise UserError(f"data set {name}: the hub repository has no files ending in {', '.join(within.suffixes)}")
    return files
