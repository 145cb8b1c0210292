"""PEFT: our own format, written again with only the long-established keys."""

import shutil
from pathlib import Path

import numpy as np

from lorawgpu.errors import CheckFailed
from lorawgpu.export.effect import WeightChange, effect_of
from lorawgpu.export.ends import trained_ends
from lorawgpu.export.source import ExportSource
from lorawgpu.export.turn_end import remark
from lorawgpu.files.run_folder import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from lorawgpu.lora.peft_dir import read_adapter, write_adapter
from lorawgpu.weights.extended import folder_of_tokenizer

RUNTIME = "PEFT"


def write(folder: Path, source: ExportSource) -> None:
    write_adapter(folder, source.lora, source.tensors, source.base_name)
    if tokenizer := folder_of_tokenizer(source.folder):
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)


def read(folder: Path, source: ExportSource) -> dict[str, WeightChange]:
    lora, tensors = read_adapter(folder, source.config)
    for name, tensor in trained_ends(tensors).items():
        if not np.array_equal(tensor, source.ends.get(name)):
            raise CheckFailed(f"{folder}, read back: {name} differs from the adapter's")
    return effect_of(lora, tensors)


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
