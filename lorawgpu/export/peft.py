"""PEFT: our own format, written again with only the long-established keys."""

from pathlib import Path

from lorawgpu.export.effect import WeightChange, effect_of
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import remark
from lorawgpu.lora.peft_dir import read_adapter, write_adapter

RUNTIME = "PEFT"


def write(folder: Path, source: ExportSource) -> None:
    write_adapter(folder, source.lora, source.tensors, source.base_name)


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    return effect_of(*read_adapter(folder, source.config))


def remarks(source: ExportSource) -> list[str]:
    found = []
    if source.uncommon_settings:
        found.append(
            f"{', '.join(source.uncommon_settings)}: PEFT applies them; servers with their own loader for PEFT folders "
            "may ignore them and run at the wrong scale, or refuse: compare an answer with the sample transcript"
        )
    if source.config and source.config.ternary == "divide":
        found.append(
            "linear_class bitlinear: its layers are not torch.nn.Linear in transformers, so PEFT needs a custom module "
            "mapping to attach an adapter"
        )
    return found + remark(source, "the server has to stop there (`eos_token_id` in generate, or a stop token)")
