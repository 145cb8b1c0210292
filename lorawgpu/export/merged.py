"""Merged weights: a Hugging Face folder with W + s B A in place of W, every tensor in the dtype of the base.

Dense models only, unless `--dequantize` is given: it writes blocks as float32. For a ternary W, W + s B A is not
ternary, and rounding it to {-w, 0, w} rounds the adapter away; `--dequantize` writes it as bf16 anyway, for evaluation.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export.base_tensors import BaseTensor, base_tensors
from lorawgpu.export.ends import end_values, is_changed_end, merged_config, unties
from lorawgpu.export.hf_files import config_json, write_hf_files
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import name_turn_end
from lorawgpu.export.weights_file import Raw, read_weights, write_weights
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.modules import EMBEDDING
from lorawgpu.families.modules import HEAD as LM_HEAD
from lorawgpu.families.rope import Rope
from lorawgpu.files.untrusted import read_json_object
from lorawgpu.lora.ends import end_of
from lorawgpu.tokenizer.save import save_tokenizer
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint
from lorawgpu.weights.hf_folder import HfFolder, with_activation
from lorawgpu.weights.options import HIDDEN_ACT
from lorawgpu.weights.tensors import HEAD, Dense, expected_tensors, narrow

RUNTIME = "merged weights"
# Half a unit in the last place: relative, and absolute below the smallest normal number.
HALF_STEP = {"bf16": (2.0**-8, 2.0**-134), "f16": (2.0**-11, 2.0**-25), "f32": (2.0**-24, 2.0**-150)}
CHUNK = 1 << 24  # bytes compared at a time
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
    if isinstance(source.base, GgufCheckpoint):
        config_json(source.checkpoint)  # some models have none: said before gigabytes are written


def description(source: ExportSource) -> str:
    """The export in a few words, with a warning for a ternary base."""
    return "merged, ternary layers dequantized to bf16, FOR EVALUATION ONLY" if source.config.ternary else "merged"


def write(folder: Path, source: ExportSource) -> None:
    write_weights(folder, merged_tensors(source))
    if isinstance(source.base, GgufCheckpoint):
        write_hf_files(folder, source.checkpoint, merged_config(source))
    else:
        _copy_files(folder, source)
    if source.checkpoint.own_tokenizer:
        for name in ("added_tokens.json", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)  # the base's
        save_tokenizer(folder, source.checkpoint.tokenizer(), source.config.max_position_embeddings)
    name_turn_end(folder, source)


def _copy_files(folder: Path, source: ExportSource) -> None:
    """What a base folder has next to its weights; the config of a dequantized model says so."""
    for path in source.base.path.iterdir():
        if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    config = read_json_object(folder / "config.json")
    act = source.checkpoint.options.get(HIDDEN_ACT)
    changed = with_activation(config, act) if act else dict(config)
    if source.checkpoint.quantized or source.config.ternary:
        for key in ("quantization_config", "quantization", "dtype"):
            changed.pop(key, None)
        changed["torch_dtype"] = "bfloat16" if source.config.ternary else "float32"
    if source.base.untied:  # older loaders would tie them, whatever the weights say
        changed["tie_word_embeddings"] = False
    text = changed.get("text_config", changed)
    if unties(source):
        changed["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    if source.config.vocab_size != source.base.config.vocab_size:
        text["vocab_size"] = source.config.vocab_size
    if changed != read_json_object(folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n")


def merged_tensors(source: ExportSource) -> Iterator[tuple[str, Dense | Raw]]:
    """All tensors of the merged model, one at a time. Raises CheckFailed for a value that overflows its dtype."""
    for base in base_tensors(source):
        tensor, change = base.tensor, source.effect.get(base.module)
        if is_changed_end(base.module, source):
            yield from _ends(base, source)
            continue
        if change is not None:
            tensor = _narrowed(base.name, tensor.float32() + change.delta(), tensor.dtype)
        yield base.name, tensor


def _narrowed(name: str, values: np.ndarray, dtype: str) -> Dense:
    tensor = narrow(values, dtype)
    if not np.isfinite(tensor.float32()).all():
        raise CheckFailed(f"{name}: with the adapter merged, a value overflows {dtype}")
    return tensor


def _ends(base: BaseTensor, source: ExportSource) -> Iterator[tuple[str, Dense]]:
    """The merged embedding or head in the base's dtype; also the head, if the merged model is no longer tied."""
    end = end_of(base.module)
    yield base.name, _narrowed(base.name, end_values(source, end), base.tensor.dtype)
    if end == EMBEDDING and unties(source):
        yield HEAD, _narrowed(HEAD, end_values(source, LM_HEAD), base.tensor.dtype)


def check(folder: Path, source: ExportSource) -> str:
    """Compare the files with base + change; returns a note on the rounding. Raises CheckFailed if they differ."""
    stored, kept, lost, dtypes = read_weights(folder), 0.0, 0.0, set()
    for base in base_tensors(source):
        name, tensor, change = base.name, base.tensor, source.effect.get(base.module)
        if is_changed_end(base.module, source):
            _check_ends(folder, stored, base, source)
            continue
        got = stored.pop(name, None)
        if got is None:
            raise CheckFailed(f"{folder}, read back: {name} is missing")
        if got.dtype != tensor.dtype or _shape(got) != _shape(tensor):
            raise CheckFailed(f"{folder}, read back: {name} is {got.dtype} {list(_shape(got))}")
        if isinstance(got, Dense):
            dtypes.add(got.dtype)
        if change is None:
            if not _same_bytes(got.data, tensor.data):
                raise CheckFailed(f"{folder}, read back: {name} is not the base model's")
            continue
        delta = change.delta()
        error = np.abs(got.float32() - (tensor.float32() + delta))
        relative, absolute = HALF_STEP[got.dtype]
        if not (error <= relative * np.abs(got.float32()) + absolute + 1e-6 * np.abs(delta)).all():
            raise CheckFailed(f"{folder}, read back: {name} is not base plus change, rounded")
        kept += float(np.square(delta, dtype=np.float64).sum())
        lost += float(np.square(error, dtype=np.float64).sum())
    if stored:
        raise CheckFailed(f"{folder}, read back: {min(stored)} is not a tensor of the base model")
    rounding = (lost / (kept or 1.0)) ** 0.5
    return (
        f"every weight, in {' and '.join(sorted(dtypes))}, is base plus change; rounding moves them by {rounding:.1e} "
        "of the change"
    )


def _check_ends(folder: Path, stored: dict[str, Dense | Raw], base: BaseTensor, source: ExportSource) -> None:
    for name, want in _ends(base, source):
        got = stored.pop(name, None)
        if (
            got is None
            or got.dtype != want.dtype
            or _shape(got) != _shape(want)
            or not _same_bytes(got.data, want.data)
        ):
            raise CheckFailed(f"{folder}, read back: {name} is not base plus change, rounded")


def _shape(tensor: Dense | Raw) -> tuple[int, ...]:
    return tensor.shape if isinstance(tensor, Raw) else tensor.data.shape


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Compared in chunks, because a table of embeddings can be larger than the memory."""
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return all(np.array_equal(a[i : i + CHUNK], b[i : i + CHUNK]) for i in range(0, len(a), CHUNK))


def reopen(folder: Path, source: ExportSource) -> HfFolder:
    """Open the export as a checkpoint. Raises CheckFailed if its config describes another model than the base."""
    checkpoint = HfFolder(folder, str(folder))
    if not same_model(checkpoint.config, merged_config(source)):
        raise CheckFailed(
            f"{folder}, read back: its config.json does not describe the same model as {source.checkpoint.name}"
        )
    return checkpoint


def same_model(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether two configs are equal, but for where they stop. A GGUF describes RoPE in another way, and keeps no other
    tower's prefix."""

    def plain(config: ModelConfig) -> tuple:
        layers = (replace(layer, attention=replace(layer.attention, rope=Rope(1.0))) for layer in config.layers)
        return astuple(replace(config, layers=tuple(layers), prefix="", eos_token_ids=()))

    def ropes(config: ModelConfig) -> list:
        found = []
        for rope, head_dim in ((layer.attention.rope, layer.attention.head_dim) for layer in config.layers):
            inv = [rope.inv_freq(head_dim, long).tolist() for long in (False, True)]
            switch = rope.original_max_position_embeddings if rope.switches else 0
            found.append([inv, rope.attention_factor, switch, rope.rotary(head_dim)])
        return found

    return _close(plain(a), plain(b)) and _close(ropes(a), ropes(b))


def _close(a: object, b: object) -> bool:
    """Equality of nested values; numbers such as 1/x and x**-2 come back from a config.json rounded."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def remarks(source: ExportSource) -> list[str]:
    if source.config.ternary:
        return [
            "these bf16 weights are not the model that was trained: use them to evaluate the adapter elsewhere, not to "
            "serve it. Activations are no longer rounded to int8, the weights take eight times the memory, and "
            "quantizing them again destroys the adapter. Serve base model and adapter unmerged (--to peft or gguf)"
        ]
    if source.checkpoint.quantized:
        unmerged = "gguf" if isinstance(source.base, GgufCheckpoint) else "peft"
        return [
            "the base model was quantized: the folder holds its dequantized weights in float32. Quantizing them again "
            f"changes them; to keep the base model as it is, serve it with the adapter unmerged (--to {unmerged})"
        ]
    return []
