"""PEFT: our own format, written anew with the long-standing keys."""

from pathlib import Path

from lorawgpu.export.effect import WeightChange, effect_of
from lorawgpu.export.source import ExportSource
from lorawgpu.lora.peft_dir import read_adapter, write_adapter

RUNTIME = "PEFT"


def write(folder: Path, source: ExportSource) -> None:
    write_adapter(folder, source.lora, source.tensors, source.base_name)


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    return effect_of(*read_adapter(folder, source.config))


def remarks(source: ExportSource) -> list[str]:
    found = []
    if source.peculiar:
        found.append(
            f"{', '.join(source.peculiar)}: PEFT applies them; servers that read PEFT folders with a loader of their "
            "own may ignore them and run at a wrong scale or refuse: compare an answer with the sample transcript"
        )
    if source.config and source.config.ternary == "divide":
        found.append(
            "linear_class bitlinear: its layers are no torch.nn.Linear in transformers, to which PEFT can attach no "
            "adapter without a module mapping of your own"
        )
    return found
