"""The tensors of a merged GGUF file: their names and types there, and their values with the adapter merged."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from lorawgpu.errors import CheckFailed
from lorawgpu.export.ends import end_values, is_changed_end, merged_config, unties
from lorawgpu.export.gguf import permute
from lorawgpu.export.separate import DOWN, FUSED, FUSED_DOWN, PARTS
from lorawgpu.export.source import ExportSource
from lorawgpu.families.gguf_metadata import rope_tensors
from lorawgpu.families.registry import FAMILIES
from lorawgpu.files.gguf import PLAIN
from lorawgpu.files.gguf_writer import TensorPlan
from lorawgpu.lora.ends import end_of
from lorawgpu.util.threads import InOrder
from lorawgpu.weights.gguf_checkpoint import TOP_NAMES, GgufCheckpoint, hf_name, permuted_heads
from lorawgpu.weights.tensors import HEAD, SCALAR, Dense, expected_tensors, unused_tensors

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # that the gguf library can write
WRITABLE = {name.upper() for name in TYPES}
INSTEAD = "Q8_0"  # of types that can be read but not written
ROWS = 1 << 22  # values that are encoded at a time


@dataclass(frozen=True)
class Item:
    """A tensor of the file: what it is called there, and where its values come from.

    `name`: ours, or "" for one that is only copied; `half`: which half of the rows, where GGUF splits a matrix in two.
    """

    plan: TensorPlan
    name: str = ""
    half: int | None = None
    values: np.ndarray | None = None  # of a tensor that the base does not have


def items_of(source: ExportSource, quantize: str | None) -> list[Item]:
    """All tensors of the file, in order. `quantize`: the type of all matrices, None for the base's own."""
    of = _items_of_gguf if isinstance(source.base, GgufCheckpoint) else _items_of_folder
    return of(source, quantize)


def _items_of_gguf(source: ExportSource, quantize: str | None) -> list[Item]:
    checkpoint, items = source.base, []
    family, known = FAMILIES[source.config.family], set(source.base.keys())
    for stored, info in checkpoint.file.tensors.items():
        name = hf_name(stored, family, source.config)
        changed = is_changed(stored, source)
        kind, shape = info.type, info.shape
        if is_changed_end(name.removesuffix(".weight"), source):
            shape = (source.config.vocab_size, *shape[1:])
        if len(shape) > 1 and name in known:
            kind = _type(quantize, info.type if not changed or info.type in WRITABLE else INSTEAD, shape)
        same = not changed and kind == info.type
        items.append(Item(TensorPlan(stored, kind, shape), "" if same else name))
        if name == checkpoint.embedding_name and unties(source):
            items.append(Item(TensorPlan("output.weight", kind, shape), HEAD))
    return items


def _type(quantize: str | None, own: str, shape: tuple[int, ...]) -> str:
    """The type of a matrix: f16 where its rows are no whole blocks."""
    kind = quantize.upper() if quantize else own
    return "F16" if kind not in PLAIN and shape[-1] % 32 else kind


def _items_of_folder(source: ExportSource, quantize: str | None) -> list[Item]:
    """llama.cpp also wants the keys and values that no layer reads, where layers share another layer's."""
    checkpoint, items, stored_here = source.checkpoint, [], source.base.stored()
    unused = [name for name in sorted(unused_tensors(source.config)) if name in stored_here]
    shapes = expected_tensors(merged_config(source)) | {name: checkpoint.dense(name).data.shape for name in unused}
    for name, shape in shapes.items():
        for stored, half in _stored_names(name, source):
            size = shape if half is None else (shape[0] // 2, *shape[1:])
            own = {"f32": "F32", "bf16": "F16", "f16": "F16"}.get(
                checkpoint.store(source.checkpoint.head_name if name == HEAD else name), INSTEAD
            )
            kind = "F32" if len(size) == 1 else _type(quantize, own, size)
            items.append(Item(TensorPlan(stored, kind, size), name, half))
    for stored, values in rope_tensors(source.config, FAMILIES[source.config.family]).items():
        items.append(Item(TensorPlan(stored, "F32", values.shape), values=values))
    return items


def _stored_names(name: str, source: ExportSource) -> list[tuple[str, int | None]]:
    """GGUF's name of a tensor, and the half of its rows that it has; two of them for a matrix that GGUF splits."""
    family, config = FAMILIES[source.config.family], source.config
    below = name.removeprefix(config.prefix)
    if name == HEAD:
        return [("output.weight", None)]
    if not below.startswith("layers."):
        top = {ours: theirs for theirs, ours in (TOP_NAMES | dict(family.gguf.top_names)).items()}
        return [(f"{top[below.removesuffix('.weight')]}.weight", None)]
    _, layer, path = below.split(".", 2)
    module, kind = (path, "weight") if path == SCALAR else path.rsplit(".", 1)
    parts = {part: theirs for theirs, part in family.gguf.layer_names.items()}
    if module == FUSED:
        return [(f"blk.{layer}.{parts[part]}.{kind}", half) for half, part in enumerate(PARTS)]
    return [(f"blk.{layer}.{parts[DOWN if module == FUSED_DOWN else module]}.{kind}", None)]


def pieces_of(source: ExportSource, item: Item) -> Iterator[np.ndarray]:
    """The bytes of a tensor in pieces."""
    if item.values is not None:
        yield item.values
    elif not item.name:
        raw = source.base.file.raw(item.plan.name)
        step = max(1, ROWS // max(1, raw.shape[1]))
        yield from (raw[i : i + step] for i in range(0, len(raw), step))
    else:
        yield from encode(values_of(source, item), item.plan)


def values_of(source: ExportSource, item: Item) -> Dense:
    """A tensor with the adapter merged, in GGUF's order of rows; float32 if anything is changed."""
    checkpoint, family = source.checkpoint, FAMILIES[source.config.family]
    module, kind = item.name.rsplit(".", 1)
    if is_changed_end(module, source):
        return Dense(end_values(source, end_of(module)), "f32")
    stored = checkpoint.dense(item.name)
    change = source.effect.get(module) if kind == "weight" else None
    offset = 0.0 if isinstance(source.base, GgufCheckpoint) or not module.endswith("norm") else family.norm_offset
    if change is not None or offset:
        stored = Dense(stored.float32() + (np.float32(offset) if change is None else change.delta()), "f32")
    if item.half is not None:
        stored = Dense(np.split(stored.data, 2)[item.half], stored.dtype)
    if heads := permuted_heads(module, source.config, family):
        rows = stored.data.reshape(len(stored.data), -1)
        stored = Dense(permute(rows, heads).reshape(stored.data.shape), stored.dtype)
    return stored


def encode(tensor: Dense, plan: TensorPlan) -> Iterator[np.ndarray]:
    """The bytes of a tensor in pieces, converted to float32 and to its type in threads, a few rows at a time.

    CheckFailed for a value that overflows the type.
    """
    from gguf import GGMLQuantizationType, quants

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    step = max(1, ROWS // rows.shape[1])
    done: list[np.ndarray] = []

    def one(start: int) -> np.ndarray:
        values = np.ascontiguousarray(Dense(rows[start : start + step], tensor.dtype).float32())
        with np.errstate(over="ignore"):
            piece = quants.quantize(values, GGMLQuantizationType[plan.type])
        if plan.type == "F16" and not np.isfinite(piece).all():
            raise CheckFailed(
                f"{plan.name}: with the adapter merged, a value overflows f16; add --quantize bf16 or f32"
            )
        return piece

    with InOrder() as pieces:
        for start in range(0, len(rows), step):
            pieces.put(partial(one, start), done.append)
            while done:
                yield done.pop(0)
    yield from done


def is_changed(stored: str, source: ExportSource) -> bool:
    """Whether the adapter changes a tensor of a GGUF base."""
    name = hf_name(stored, FAMILIES[source.config.family], source.config)
    module = name.removesuffix(".weight")
    return module in source.effect or is_changed_end(module, source)
