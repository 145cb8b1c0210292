"""Downloading models from the Hugging Face hub with `huggingface_hub` (extra `hub`), into its own cache."""

import re
from pathlib import Path

from lorawgpu.errors import UserError

GGUF_ON_HUB = "A GGUF file of the hub is named owner/model/file.gguf, its repository owner/model"
PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
HUB_NAME = re.compile(rf"(?P<repo>{PART}/{PART})(?:/(?P<file>(?:{PART}/)*{PART}\.gguf))?")
# Not the whole repository: many have the same weights again in other formats.
FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
]  # fmt: skip


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `owner/model` or `owner/model/file.gguf`."""
    return HUB_NAME.fullmatch(name) is not None


def download(name: str) -> Path:
    """The local folder (or GGUF file) of a hub name, downloaded unless it is cached.

    UserError if the library is missing, the hub cannot be reached, or it refuses (with its own message).
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder; to download it from the Hugging Face hub: pip install huggingface_hub"
        ) from None
    match = HUB_NAME.fullmatch(name)
    try:
        if match["file"]:
            return _file(match["repo"], match["file"], hf_hub_download)
        return Path(snapshot_download(match["repo"], allow_patterns=FILES))
    except Exception as error:  # the library raises its own errors, its HTTP client's and the system's
        raise UserError(f"{name}: no such file or folder, and {explain_failure(error)}") from None


def _file(repo: str, file: str, hf_hub_download) -> Path:
    """One file of a repository; without a network the cached one, at once: the library would retry six times."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(repo)
    except Exception as error:
        if was_reached(error):
            raise
        try:
            return Path(hf_hub_download(repo, file, local_files_only=True))
        except Exception:
            raise error from None
    return Path(hf_hub_download(repo, file))


def cached_data_set(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub data set in the hub's cache, which may hold only some of its files; None if there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
    except Exception:
        return None


def explain_failure(error: Exception) -> str:
    """Why a download failed: the hub's own message, or what to do if it was not reached."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
    if was_reached(error):
        return f"the Hugging Face hub says: {reason}"
    return (
        f"the Hugging Face hub cannot be reached ({reason}): go online, or download it on another machine "
        "(`hf download`) and pass the folder"
    )


def was_reached(error: Exception) -> bool:
    """Whether the hub answered. Goes by class names: the library's version decides which HTTP client raises."""
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    return not any(word in names for word in ("Connect", "Timeout", "Transport", "Offline", "LocalEntryNotFound"))
