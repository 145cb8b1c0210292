"""Fetch a model from the Hugging Face hub into its own cache, through `huggingface_hub` (extra `hub`)."""

import re
from pathlib import Path

from lorawgpu.errors import UserError

PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
HUB_NAME = re.compile(rf"(?P<repo>{PART}/{PART})(?:/(?P<file>(?:{PART}/)*{PART}\.gguf))?")
# Never the whole repository: many hold the same weights again in other formats.
FILES = [
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
]  # fmt: skip


def is_hub_name(name: str) -> bool:
    """Whether `name` can be `owner/model` or `owner/model/file.gguf` on the hub."""
    return HUB_NAME.fullmatch(name) is not None


def download(name: str) -> Path:
    """The local folder (or GGUF file) of a hub name, downloaded unless it is in the cache.

    Raises UserError when the library is missing, or with the hub's own words when it refuses.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder; to fetch it from the hub install the extra: pip install 'lorawgpu[hub]'."
        ) from None
    match = HUB_NAME.fullmatch(name)
    try:
        if match["file"]:
            return _file(match["repo"], match["file"], hf_hub_download)
        return Path(snapshot_download(match["repo"], allow_patterns=FILES))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
        raise UserError(f"{name}: no such file or folder, and {why_not(error)}") from None


def _file(repo: str, file: str, hf_hub_download) -> Path:
    """One file of a repository. Without a network what the cache holds, at once: the library would try six times."""
    from huggingface_hub import HfApi

    try:
        HfApi().repo_info(repo)
    except Exception as error:
        if _reached(error):
            raise
        try:
            return Path(hf_hub_download(repo, file, local_files_only=True))
        except Exception:
            raise error from None
    return Path(hf_hub_download(repo, file))


def why_not(error: Exception) -> str:
    """Why the hub did not give something: its own words, or what to do where it was not reached."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
    if _reached(error):
        return f"the hub does not give it: {reason}"
    return (
        f"the hub cannot be reached ({reason}): connect this machine, or fetch it on another one (`hf download`) and "
        "give its folder"
    )


def _reached(error: Exception) -> bool:
    """Whether the hub answered. By names: which HTTP client's errors these are depends on the library's version."""
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    return not any(word in names for word in ("Connect", "Timeout", "Transport", "Offline", "LocalEntryNotFound"))
