"""Ollama: a folder that `ollama create NAME` reads: a GGUF file, merged or of the adapter alone, and a Modelfile."""

from pathlib import Path

from lorawgpu.errors import UserError
from lorawgpu.export import gguf, gguf_merged
from lorawgpu.export.modelfile import modelfile, pieces_of
from lorawgpu.export.source import ExportSource
from lorawgpu.files.ollama import PREFIX
from lorawgpu.weights.gguf_checkpoint import GgufCheckpoint

FILE = "Modelfile"


def is_merged(source: ExportSource, asked: bool) -> bool:
    """Whether the model is merged: on request, and always from a folder, because Ollama's adapters need a GGUF base."""
    return asked or not isinstance(source.base, GgufCheckpoint)


def write_modelfile(folder: Path, source: ExportSource, merged: bool, system: str | None) -> list[str]:
    """Write the Modelfile; returns what to say about it."""
    template, stops, notes = None, [], []
    try:
        prompts = source.prompts
        if prompts.template is None:
            raise UserError("the model has none")
        end = prompts.turn_end()
        stops = [] if end is None else [prompts.tokenizer.token(end)]
        bos = prompts.tokenizer.special_tokens.get("bos_token") if prompts.tokenizer.add_bos else None
        template = pieces_of(prompts.template, bos).go()
    except UserError as error:
        notes.append(f"the Modelfile has no TEMPLATE, so Ollama looks for one of its own: the chat template: {error}")
    if merged:
        text = modelfile(f"./{gguf_merged.FILE}", None, template, stops, system)
    else:
        text = modelfile(_base(source.checkpoint), f"./{gguf.FILE}", template, stops, system)
    (folder / FILE).write_text(text, encoding="utf-8")
    return notes


def _base(checkpoint: GgufCheckpoint) -> str:
    name = checkpoint.name
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else str(checkpoint.path.resolve())


def next_command(out: Path) -> str:
    """What makes the export a model of Ollama's."""
    return f"ollama create {out.name.lower()} -f {out / FILE}"
