"""Merged weights: a Hugging Face folder with W + s B A in place of W, every tensor in the dtype of the base.

Dense models only, unless `--dequantize` is given: it writes blocks as float32. For a ternary W, W + s B A is not
ternary, and rounding it to {-w, 0, w} rounds the adapter away; `--dequantize` writes it as bf16 anyway, for evaluation.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export.hf_files import write_hf_files
from lorawgpu.export.source import ExportSource
from lorawgpu.export.weights_file import read_weights, write_weights
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.rope import Rope
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.hf_folder import HfFolder
from lorawgpu.weights.tensors import Dense, expected_tensors, is_linear

RUNTIME = "merged weights"
# Half a unit in the last place: relative, and absolute below the smallest normal number.
HALF_STEP = {"bf16": (2.0**-8, 2.0**-134), "f16": (2.0**-11, 2.0**-25), "f32": (2.0**-24, 2.0**-150)}
COPIED = {".json", ".jinja", ".txt", ".model", ".md", ".py", ""}  # of the files in a model folder that are not weights


def check_mergeable(source: ExportSource, dequantize: bool) -> None:
    """Raises UserError, with the reason, if merging makes no sense."""
    if source.config.ternary and not dequantize:
        raise UserError(
            f"{source.checkpoint.name} is ternary, so an adapter cannot be merged into it: rounding to -w, 0 and w "
            "destroys so small a change. Serve base model and adapter unmerged (--to peft or gguf); --dequantize "
            "writes merged bf16 weights for evaluation only"
        )
    quantized = source.checkpoint.quantized
    if quantized and not dequantize:
        size = 4 * sum(math.prod(shape) for shape in expected_tensors(source.config).values()) / 2**30
        raise UserError(
            f"{source.checkpoint.name} is quantized; merged weights are float32 and take {size:.1f} GiB: add "
            "--dequantize to write them, or serve the same base with the adapter unmerged (--to peft or gguf)"
        )
    if dequantize and not (quantized or source.config.ternary):
        raise UserError("--dequantize is for ternary and quantized models; this one is dense: remove it")


def description(source: ExportSource) -> str:
    """The export in a few words, with a warning for a ternary base."""
    return "merged, ternary layers dequantized to bf16, FOR EVALUATION ONLY" if source.config.ternary else "merged"


def write(folder: Path, source: ExportSource) -> None:
    write_weights(folder, merged_tensors(source))
    if isinstance(source.checkpoint, GgufCheckpoint):
        write_hf_files(folder, source.checkpoint)
        return
    for path in source.checkpoint.path.iterdir():
        if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    if source.checkpoint.quantized or source.config.ternary:
        config = read_json_object(folder / "config.json")
        config.pop("quantization_config", None)
        config.pop("dtype", None)
        dtype = "bfloat16" if source.config.ternary else "float32"
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")


def merged_tensors(source: ExportSource) -> Iterator[tuple[str, Dense]]:
    """All tensors of the merged model, one at a time. Raises CheckFailed for a value that overflows its dtype."""
    for name in source.checkpoint.keys():
        base = _base(source, name)
        change = source.effect.get(name.removesuffix(".weight"))
        if change is not None:
            base = narrow(base.float32() + change.delta(), base.dtype)
            if not np.isfinite(base.float32()).all():
                raise CheckFailed(f"{name}: with the adapter merged, a value overflows {base.dtype}")
        yield name, base


def _base(source: ExportSource, name: str) -> Dense:
    if not (source.config.ternary and is_linear(name)):
        return source.checkpoint.dense(name)
    ternary = source.checkpoint.ternary(name)
    return narrow(ternary.values().astype(np.float32) * np.float32(ternary.scale), "bf16")


def narrow(values: np.ndarray, dtype: str) -> Dense:
    """float32 rounded to nearest, ties to even."""
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return Dense(values.astype({"f16": np.float16, "f32": np.float32}[dtype]), dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return Dense(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), dtype)


def check(folder: Path, source: ExportSource) -> str:
    """Compare the files with base + change; returns a note on the rounding. Raises CheckFailed if they differ."""
    stored, kept, lost = read_weights(folder), 0.0, 0.0
    names = source.checkpoint.keys()
    if odd := sorted(stored.keys() ^ set(names)):
        raise CheckFailed(f"{folder}, read back: {odd[0]} is in only one of base model and export")
    for name in names:
        base, got = _base(source, name), stored[name]
        change = source.effect.get(name.removesuffix(".weight"))
        if got.dtype != base.dtype or got.data.shape != base.data.shape:
            raise CheckFailed(f"{folder}, read back: {name} is {got.dtype} {list(got.data.shape)}")
        if change is None:
            if not np.array_equal(got.data.view(np.uint8), np.ascontiguousarray(base.data).view(np.uint8)):
                raise CheckFailed(f"{folder}, read back: {name} is not the base model's")
            continue
        delta = change.delta()
        error = np.abs(got.float32() - (base.float32() + delta))
        relative, absolute = HALF_STEP[got.dtype]
        if not (error <= relative * np.abs(got.float32()) + absolute + 1e-6 * np.abs(delta)).all():
            raise CheckFailed(f"{folder}, read back: {name} is not base plus change, rounded")
        kept += float(np.square(delta, dtype=np.float64).sum())
        lost += float(np.square(error, dtype=np.float64).sum())
    rounding = (lost / (kept or 1.0)) ** 0.5
    dtypes = " and ".join(sorted({stored[name].dtype for name in names}))
    return f"every weight, in {dtypes}, is base plus change; rounding moves them by {rounding:.1e} of the change"


def reopen(folder: Path, source: ExportSource) -> HfFolder:
    """Open the export as a checkpoint. Raises CheckFailed if its config describes another model than the base."""
    checkpoint = HfFolder(folder, str(folder))
    if not _same_model(checkpoint.config, source.config):
        raise CheckFailed(
            f"{folder}, read back: its config.json does not describe the same model as {source.checkpoint.name}"
        )
    return checkpoint


def _same_model(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether two configs are equal. RoPE is compared by frequencies, which a GGUF describes in another way."""

    def without_rope(config: ModelConfig) -> ModelConfig:
        layers = (replace(layer, attention=replace(layer.attention, rope=Rope(1.0))) for layer in config.layers)
        return replace(config, layers=tuple(layers))

    def frequencies(config: ModelConfig) -> list:
        return [layer.attention.rope.inv_freq(layer.attention.head_dim) for layer in config.layers]

    same = without_rope(a) == without_rope(b)
    return same and all(map(partial(np.allclose, rtol=1e-6, atol=0), frequencies(a), frequencies(b)))


def remarks(source: ExportSource) -> list[str]:
    if source.config.ternary:
        return [
            "these bf16 weights are not the model that was trained: use them to evaluate the adapter elsewhere, not to "
            "serve it. Activations are no longer rounded to int8, the weights take eight times the memory, and "
            "quantizing them again destroys the adapter. Serve base model and adapter unmerged (--to peft or gguf)"
        ]
    if source.checkpoint.quantized:
        unmerged = "gguf" if isinstance(source.checkpoint, GgufCheckpoint) else "peft"
        return [
            "the base model was quantized: the folder holds its dequantized weights in float32. Quantizing them again "
            f"changes them; to keep the base model as it is, serve it with the adapter unmerged (--to {unmerged})"
        ]
    return []
