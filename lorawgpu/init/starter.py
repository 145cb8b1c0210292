"""A starter config: what was recognized of a model and its data, as comments, and settings that fit them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.dataset import Concat, Data
from lorawgpu.data.field_names import described
from lorawgpu.data.formats import FORMATS
from lorawgpu.files.names import stem_of
from lorawgpu.train.setup import TextSetup, load_data, text_setup_of_model
from lorawgpu.train.summary import model_text
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.tensors import expected_tensors

LONGEST = 4096  # tokens: longer samples are dropped, rather than that all of them take the memory of the longest
ROWS, ROWS_OF_LARGE = 2048, 1024  # tokens at once
LARGE = 5e8  # parameters
SMALL = 2e8
SAMPLES_PER_STEP, STEPS_PER_EPOCH = 8, 10  # the latter as a minimum
FEW, MANY = 20, 2000  # samples: fewer are not held out, more are enough for one epoch
# A token of each built-in template that says that the model was made for it.
MARKS = {"chatml": "<|im_end|>", "llama-3": "<|start_header_id|>", "gemma": "<start_of_turn>", "mistral": "[INST]"}
PLAIN = "alpaca"  # needs no special token but EOS
TEXTS = ("prompt_completion", "segments", "text", "pretokenized")  # types that need no chat template


@dataclass(frozen=True)
class Source:
    """What to write a config for: `model` and `data` as given, `kind`: the type of the data, None to detect it."""

    model: str
    data: str
    kind: str | None = None


def starter(source: Source, out: Path) -> str:
    """The text of a config that will lie in `out`. UserError if model or data cannot be read or trained on."""
    checkpoint = open_checkpoint(source.model)
    template, text, data = _read(source, checkpoint)
    settings = _settings(source, checkpoint, data, template, out)
    return _written(settings, _found(source, checkpoint, data, text, template, settings))


def _read(source: Source, checkpoint: Checkpoint) -> tuple[str | None, TextSetup, Data]:
    """The built-in template that the config has to name, if any, and the data, whole or cut at the model's context."""
    keys = {
        "base_model": source.model,
        "datasets": [{"path": source.data} | ({"type": source.kind} if source.kind else {})],
        "sequence_len": checkpoint.config.max_position_embeddings,
        "excess_length_strategy": "truncate",
    }
    config = TrainConfig(**keys)
    text = text_setup_of_model(config, checkpoint)
    if text.template or text.tokenizer is None:
        return None, text, load_data(config, text)
    has = text.tokenizer.token_id
    name = next((name for name, mark in MARKS.items() if has(mark) is not None), PLAIN)
    with_template = text_setup_of_model(TrainConfig(**keys, chat_template=name), checkpoint)
    data = load_data(config, with_template)
    needed = any(store.kind not in TEXTS for store in data.stores)
    return (name, with_template, data) if needed else (None, text, data)


def _settings(source: Source, checkpoint: Checkpoint, data: Data, template: str | None, out: Path) -> dict:
    """The keys of the config, in order."""
    lengths = Concat(data.train).lengths
    context, longest = checkpoint.config.max_position_embeddings, int(lengths.max())
    length = longest if longest <= LONGEST // 2 else max(LONGEST // 2, int(np.percentile(lengths, 98)))
    length = min(context, LONGEST, -(-length // 64) * 64)
    parameters = sum(math.prod(shape) for shape in expected_tensors(checkpoint.config).values())
    count = int(np.count_nonzero(lengths <= length))
    held_out = 0 if data.validation is not None or count < FEW else 0.1 if count <= MANY else MANY // 10
    count -= int(held_out if held_out >= 1 else round(held_out * count))
    epochs = 3 if count <= MANY else 1
    per_step = min(SAMPLES_PER_STEP, max(1, count // STEPS_PER_EPOCH))
    micro = max(1, min(per_step, (ROWS_OF_LARGE if parameters > LARGE else ROWS) // length))
    accumulation = max(1, per_step // micro)
    steps = epochs * math.ceil(math.ceil(count / micro) / accumulation)
    evaluated = (data.validation is not None or held_out) and epochs == 1
    return {
        "base_model": _path(source.model, out),
        "chat_template": template,
        "datasets": [{"path": _path(source.data, out)} | ({"type": source.kind} if source.kind else {})],
        "val_set_size": held_out or None,
        "sequence_len": length,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "num_epochs": epochs,
        "learning_rate": 5e-4 if parameters < SMALL else 2e-4,
        "warmup_ratio": 0.03,
        "lora_r": 16,
        "lora_alpha": 32,
        "gradient_checkpointing": True if parameters > LARGE else None,
        "logging_steps": max(1, min(10, steps // 20)),
        "eval_steps": max(1, steps // 5) if evaluated else None,
        "output_dir": _free_folder(source.data),
    }


COMMENTS = {
    "base_model": "frozen",
    "chat_template": "the model has none of its own",
    "val_set_size": "held out for evaluation: a fraction, or a number of samples",
    "sequence_len": "longest sample, in tokens; longer ones are dropped and counted",
    "micro_batch_size": "samples at once; lower it if memory runs out",
    "gradient_accumulation_steps": "micro-batches per step",
    "num_epochs": "passes over the data",
    "learning_rate": "peak; lower it if the loss rises",
    "warmup_ratio": "fraction of the steps over which the rate rises from 0",
    "lora_r": "rank: the adapter's capacity",
    "lora_alpha": "the adapter's output is scaled by alpha / r",
    "gradient_checkpointing": "a third of the memory for a fifth more time",
    "logging_steps": "steps between metrics",
    "eval_steps": "steps between evaluations",
    "output_dir": "adapter, checkpoints, metrics.jsonl, report.html",
}


def _found(source, checkpoint, data: Data, text: TextSetup, template: str | None, settings: dict) -> list[str]:
    """What was recognized."""
    lengths, kinds = Concat(data.train).lengths, list(dict.fromkeys(store.kind for store in data.stores))
    keys = [" + ".join(FORMATS[kind][0]) if kind in FORMATS else described(kind) for kind in kinds]
    own = "its own" if text.template and not template else template or "none"
    dropped = int(np.count_nonzero(lengths > settings["sequence_len"]))
    lines = [
        f"Model: {model_text(checkpoint)}, context {checkpoint.config.max_position_embeddings:,}; chat template: {own}",
        f"Data: {', '.join(kinds)} ({'; '.join(keys)}): {len(lengths):,} samples of {int(lengths.min()):,} to "
        f"{int(lengths.max()):,} tokens, half of them up to {int(np.median(lengths)):,}",
    ]
    if dropped:
        lines.append(f"{dropped:,} samples are longer than sequence_len and will be dropped")
    if data.validation is not None:
        lines.append(f"Held out: {len(data.validation):,} samples of the folder's validation files")
    return lines + [f"Note: {note}" for note in data.notes if not any(note.endswith(f": {key}") for key in keys)]


def _written(settings: dict, found: list[str]) -> str:
    lines = ["# A starter config, written by lorawgpu init; change what you like.", "#", *(f"# {f}" for f in found), ""]
    for key, value in settings.items():
        if value is None:
            continue
        if key == "datasets":
            entries = [f"{name}: {_scalar(item)}" for name, item in value[0].items()]
            lines += ["datasets:", *(f"  {'-' if not n else ' '} {entry}" for n, entry in enumerate(entries))]
        else:
            lines.append(f"{key}: {_scalar(value)} # {COMMENTS[key]}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    return yaml.safe_dump(value, allow_unicode=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def _path(name: str, out: Path) -> str:
    """A path or name for a config in `out`: absolute if the config is elsewhere than here."""
    here = out.absolute().parent == Path.cwd()
    return os.path.abspath(name) if not here and Path(name).exists() else name


def _free_folder(data: str) -> str:
    """A folder under out/ that does not exist."""
    name, number = f"out/{stem_of(data)}", 1
    while os.path.lexists(name if number == 1 else f"{name}-{number}"):
        number += 1
    return name if number == 1 else f"{name}-{number}"
