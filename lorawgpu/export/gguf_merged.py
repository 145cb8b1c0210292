"""llama.cpp: the merged model as one GGUF file, W + s B A in place of W, quantized as it is written.

From a GGUF base everything but the changed matrices is copied byte by byte. From a folder the metadata is written anew
(families/gguf_metadata.py, tokenizer/to_gguf.py). Either way the file is opened again and compared before it is done.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lorawgpu.errors import CheckFailed, UserError
from lorawgpu.export.ends import merged_config
from lorawgpu.export.gguf import NO_WINDOW, arch_of, family_remarks
from lorawgpu.export.gguf_tensors import INSTEAD, TYPES, WRITABLE, Item, is_changed, items_of, pieces_of, values_of
from lorawgpu.export.merged import same_model
from lorawgpu.export.separate import FUSED
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import unnamed_turn_end
from lorawgpu.families.config import ModelConfig
from lorawgpu.families.gguf_metadata import metadata_of
from lorawgpu.families.registry import FAMILIES
from lorawgpu.families.spec import Paths
from lorawgpu.files.dtypes import DENSE_TYPES, widen
from lorawgpu.files.gguf_writer import write_gguf
from lorawgpu.tokenizer.metadata import USER_DEFINED
from lorawgpu.tokenizer.to_gguf import tokenizer_metadata
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint

FILE = "model.gguf"
FILE_TYPES = dict(zip(TYPES, (0, 1, 32, 7, 9, 8, 3, 2), strict=True))  # llama.cpp's numbers for general.file_type
remarks = family_remarks
# The largest error of a value, relative to the largest in its row: half a step of its type, and for types with a scale
# a little more, because the scale is rounded to f16.
LARGEST_ERROR = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 0.5 / 127 + 2.0**-11, "Q5_1": 1 / 28,
                 "Q5_0": 1 / 14, "Q4_1": 1 / 13, "Q4_0": 1 / 7}  # fmt: skip


def check(source: ExportSource) -> None:
    """UserError for a base that an adapter cannot be merged into."""
    if source.config.ternary:
        raise UserError(
            f"{source.checkpoint.name} is ternary, so an adapter cannot be merged into it: rounding to -w, 0 and w "
            "destroys so small a change. Serve base model and adapter unmerged (--to gguf without --merged, or peft)"
        )


def write(folder: Path, source: ExportSource, quantize: str | None, arch: str | None = None) -> None:
    """Write `model.gguf`. UserError if this model or its tokenizer cannot be described in a GGUF file, CheckFailed if a
    value overflows its type."""
    items = items_of(source, quantize)
    if isinstance(source.base, GgufCheckpoint):
        metadata, kinds = dict(source.base.file.metadata) | _more_tokens(source), source.base.file.kinds
    else:
        metadata, kinds = _metadata(source, arch), {}
    metadata |= _turn_end(source, metadata) | {"general.file_type": _file_type(items)}
    tensors = ((item.plan, pieces_of(source, item)) for item in items)
    write_gguf(folder / FILE, metadata, tensors, [item.plan for item in items], kinds)


def _metadata(source: ExportSource, arch: str | None) -> dict[str, Any]:
    """The keys of a model that came as a folder."""
    config, family, arch = source.config, FAMILIES[source.config.family], arch_of(source, arch)
    own = {f"{arch}.{key}": value for key, value in metadata_of(config, family).items() if value is not None}
    general = {
        "general.architecture": arch,
        "general.type": "model",
        "general.name": Path(source.base_name).name,
        "general.quantization_version": 2,
    }
    return general | own | source.checkpoint.tokenizer().call(tokenizer_metadata, config.vocab_size, arch)


def _more_tokens(source: ExportSource) -> dict[str, Any]:
    """The keys of a GGUF's tokenizer that change with tokens that the adapter brings. They are matched as a whole."""
    tokenizer, metadata = source.checkpoint.own_tokenizer, source.base.file.metadata
    if tokenizer is None:
        return {}
    before, count = source.base.tokenizer(), max(source.config.vocab_size, tokenizer.vocab_size)
    lists = {"tokens": list(metadata["tokenizer.ggml.tokens"])}
    fill = {"tokens": "", "token_type": USER_DEFINED, "scores": 0.0}
    for name in ("token_type", "scores"):
        if (key := f"tokenizer.ggml.{name}") in metadata:
            lists[name] = list(metadata[key])
    for i in range(count):
        for name, values in lists.items():
            if i >= len(values):
                values.append(fill[name])
        if (token := tokenizer.token(i)) != before.token(i) and token is not None:
            lists["tokens"][i] = token
            if "token_type" in lists and i not in tokenizer.special_ids:
                lists["token_type"][i] = USER_DEFINED
    size = f"{metadata['general.architecture']}.vocab_size"
    changed = {f"tokenizer.ggml.{name}": values for name, values in lists.items()}
    return changed | ({size: source.config.vocab_size} if size in metadata else {})


def _turn_end(source: ExportSource, metadata: dict[str, Any]) -> dict[str, int]:
    """Where a turn ends, for a runtime that stops there, and the further ends that a config names."""
    end, ends = unnamed_turn_end(source), source.config.eos_token_ids
    more = {} if end is None else {"tokenizer.ggml.eot_token_id": end}
    if len(ends) > 1 and "tokenizer.ggml.eot_token_id" not in metadata:
        more.setdefault("tokenizer.ggml.eot_token_id", ends[1])
    return more


def _file_type(items: list[Item]) -> int:
    """llama.cpp's number for the type of most values."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.plan.type] = sizes.get(item.plan.type, 0) + math.prod(item.plan.shape)
    return FILE_TYPES.get(max(sizes, key=sizes.get).lower(), FILE_TYPES["f16"])


def check_file(folder: Path, source: ExportSource, quantize: str | None) -> tuple[str, GgufCheckpoint]:
    """Open the file again and compare the model and every changed or converted tensor; returns a note, and the
    checkpoint. CheckFailed if something differs by more than rounding. (The tokenizer was chosen by its ids.)"""
    checkpoint = GgufCheckpoint(folder / FILE, str(folder / FILE))
    if not same_model(_as_gguf(checkpoint.config), _as_gguf(merged_config(source))):
        raise CheckFailed(
            f"{FILE}, read back: GGUF has no way to describe {source.checkpoint.name}: it reads as another model. "
            "Convert the merged folder (--to merged) with llama.cpp's convert_hf_to_gguf.py, or serve the adapter"
        )
    lost = size = 0.0
    for item in items_of(source, quantize):
        if not item.name:
            continue
        want = values_of(source, item).float32()
        got = checkpoint.file.read(item.plan.name)[0]
        got = widen(got, DENSE_TYPES[item.plan.type]) if item.plan.type in DENSE_TYPES else got
        error = np.abs(got - want)
        # 2^-25 is half of the smallest f16, a step that is not relative.
        limit = LARGEST_ERROR[item.plan.type] * np.abs(want).max(-1, keepdims=True) + 2.0**-25
        if not (error <= limit).all():
            raise CheckFailed(f"{FILE}, read back: {item.plan.name} is not base plus change, rounded")
        lost += float(np.square(error, dtype=np.float64).sum())
        size += float(np.square(want, dtype=np.float64).sum())
    rounding = (lost / (size or 1.0)) ** 0.5
    return f"read back: the same model; rounding moves the written weights by {rounding:.1e} of their size", checkpoint


def _as_gguf(config: ModelConfig) -> ModelConfig:
    """What GGUF can say of a config: Granite 4 is a Granite with gate and up apart, and archs that ignore a window do
    not store it."""
    family = FAMILIES[config.family]
    layers = config.layers
    if family.gguf.archs[0] in NO_WINDOW and config.family != "phi3":
        layers = tuple(replace(layer, attention=replace(layer.attention, window=None)) for layer in layers)
    if config.layers[0].paths.gate_up == (FUSED,):
        layers = tuple(replace(layer, paths=Paths()) for layer in layers)
    return replace(config, family=family.gguf.archs[0], layers=layers, bos_token_id=None, pad_token_id=None)


def size_note(folder: Path, source: ExportSource, quantize: str | None) -> str:
    """The size of the file, and why matrices changed their type if nobody asked for it."""
    size = f"{(folder / FILE).stat().st_size / 2**30:.2f} GiB"
    own = source.base
    if quantize is None and isinstance(own, GgufCheckpoint):
        changed = {i.type for n, i in own.file.tensors.items() if i.type not in WRITABLE and is_changed(n, source)}
        if changed:
            names = ", ".join(sorted(map(str.lower, changed)))
            return f"{size}; changed matrices of type {names} became {INSTEAD.lower()}, which can be written"
    return size
