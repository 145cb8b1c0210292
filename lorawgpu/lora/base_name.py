"""Whether an adapter names the model that it is used on. Names say little for sure, so a difference is only a note."""

import re
import sys
from pathlib import Path

from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.files.untrusted import brief, read_json_object

_ENDINGS = re.compile(
    r"(\.gguf|\.safetensors|-\d{5}-of-\d{5}"
    r"|[-_.](i?q\d+(_[a-z0-9]+)*|tq\d_\d|i2_s|tl[12]|b?f16|fp16|f32|fp32|int[48]|[48]-?bit|\d\.\d+bit"
    r"|unsloth|bnb|gptq|awq|mlx|gguf|ggml|quantized))$"
)
# File names that tools give, and hashes of the hub's cache.
_SAYS_NOTHING = re.compile(r"(ggml-)?model|base|merged|[0-9a-f]{40}|\.*")
_LONGEST = 1000  # characters of a name: an adapter may come from anybody


def note_other_base(adapter: str | Path, model: str) -> None:
    """A line on stderr where `adapter_config.json` of `adapter` names a model that is not called as `model` is.

    UserError as `read_json_object`.
    """
    named = read_json_object(Path(adapter) / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(named, str) or len(named) > _LONGEST:
        return
    wanted, got = plain_name(named), plain_name(model)
    if wanted and got and wanted != got:
        print(f"note: the adapter {adapter} was made for {brief(named)}; the model here is {model}", file=sys.stderr)


def plain_name(name: str) -> str:
    """The last component of a name or path, without what tells one file of a model from another; "" if nothing is left.

    "Org/Llama-1B-Instruct" and "C:\\llama-1b-instruct-Q4_K_M.gguf" are the same.
    """
    parts = re.split(r"[/\\]", name.strip().lower().rstrip("/\\"))
    if "snapshots" in parts[:-1]:  # the hub's cache: models--org--name/snapshots/hash
        parts = parts[parts.index("snapshots") - 1].split("--")
    plain = parts[-1].removeprefix("builtin:")
    while (shorter := _ENDINGS.sub("", plain)) != plain:
        plain = shorter
    return "" if _SAYS_NOTHING.fullmatch(plain) else plain
