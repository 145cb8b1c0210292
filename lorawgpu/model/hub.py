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
            return Path(hf_hub_download(match["repo"], match["file"]))
        return Path(snapshot_download(match["repo"], allow_patterns=FILES))
    except Exception as error:  # the library raises its own, its HTTP client's and the system's errors
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name}: no such file or folder, and the hub does not give it: {reason[0]}") from None
