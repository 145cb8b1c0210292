"""Checking that an adapter was trained on this base model. Names prove little, so a mismatch is only a note."""

import re
import sys
from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import ADAPTER_CONFIG_FILE
from lorawgpu.files.untrusted import brief, read_json_object

_ENDINGS = re.compile(
    r"(\.gguf|\.safetensors|-\d{5}-of-\d{5}"
    r"|[-_.](i?q\d+(_[a-z0-9]+)*|tq\d_\d|i2_s|tl[12]|b?f16|fp16|f32|fp32|int[48]|[48]-?bit|\d\.\d+bit"
    r"|unsloth|bnb|gptq|awq|mlx|gguf|ggml|quantized))$"
)
# Generic file names, and hashes of the hub's cache.
_GENERIC = re.compile(r"(ggml-)?model|base|merged|[0-9a-f]{40}|\.*")
_MAX_NAME = 1000  # characters: the adapter is untrusted


def base_for(adapter: str | Path | None, model: str | Path | None) -> str | Path:
    """`model`, or if it is None, the base that the adapter names. UserError if there is neither."""
    if model is not None:
        return model
    if adapter is None:
        raise UserError("no model given: pass it with --model, or an adapter that names its base model with --adapter")
    if base := named_base(Path(adapter)):
        return base
    raise UserError(f"{adapter}: names no base model; pass it with --model")


def note_other_base(adapter: str | Path, model: str) -> None:
    """Print a note on stderr if `adapter_config.json` of `adapter` names another base than `model`.

    UserError if that file cannot be read.
    """
    base = named_base(Path(adapter))
    wanted, got = plain_name(base), plain_name(model)
    if wanted and got and wanted != got:
        print(f"note: the adapter {adapter} was trained on {brief(base)}; this model is {model}", file=sys.stderr)


def named_base(adapter: Path) -> str:
    """The base model that an adapter's `adapter_config.json` names; "" if none, or a name that no model has.

    UserError if that file cannot be read.
    """
    base = read_json_object(adapter / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
    return base if isinstance(base, str) and len(base) <= _MAX_NAME and base.isprintable() else ""


def plain_name(name: str) -> str:
    """The last component of a name or path, lower case, without suffixes for format and quantization; may be "".

    "Org/Llama-1B-Instruct" and "C:\\llama-1b-instruct-Q4_K_M.gguf" give the same.
    """
    parts = re.split(r"[/\\]", name.strip().lower().rstrip("/\\"))
    if "snapshots" in parts[:-1]:  # the hub's cache: models--org--name/snapshots/hash
        parts = parts[parts.index("snapshots") - 1].split("--")
    plain = parts[-1].removeprefix("builtin:").removeprefix("ollama:")
    while (shorter := _ENDINGS.sub("", plain)) != plain:
        plain = shorter
    return "" if _GENERIC.fullmatch(plain) else plain
