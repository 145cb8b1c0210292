"""The source of an export: an adapter, and its base model if one is needed or given."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorawgpu.config.model_options import kept_options
from lorawgpu.errors import UserError
from lorawgpu.export.effect import WeightChange, effect_of
from lorawgpu.export.ends import trained_ends
from lorawgpu.families.config import ModelConfig
from lorawgpu.files.hub import is_hub_name
from lorawgpu.generate.prompts import Prompts, special_tokens_of, template_for
from lorawgpu.lora.base_name import base_for, named_base
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import read_adapter
from lorawgpu.weights.extended import extended_for
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.options import ModelOptions

SOUNDS_TERNARY = re.compile(r"bitnet|1\.58|ternary|1bit", re.IGNORECASE)


@dataclass(frozen=True)
class ExportSource:
    """An adapter as read; `checkpoint` is None if no base model was given and none is needed."""

    folder: Path
    lora: LoraConfig
    tensors: dict[str, np.ndarray]
    base_name: str
    checkpoint: Checkpoint | None

    @property
    def config(self) -> ModelConfig | None:
        return self.checkpoint.config if self.checkpoint else None

    @property
    def base(self) -> Checkpoint:
        """The base model as its files have it, without rows for new tokens."""
        return self.checkpoint.stored_as

    @cached_property
    def ends(self) -> dict[str, np.ndarray]:
        """The adapter's tensors of embedding and head."""
        return trained_ends(self.tensors)

    @property
    def ternary(self) -> bool | None:
        """Whether the base model is ternary; without a checkpoint judged by its name. None if unknown."""
        if self.config:
            return self.config.ternary is not None
        if is_hub_name(self.base_name) and not Path(self.base_name).exists():  # nothing is downloaded for a remark
            return SOUNDS_TERNARY.search(self.base_name) is not None
        try:
            return open_checkpoint(self.base_name, kept=kept_options(self.folder)).config.ternary is not None
        except UserError:
            return None

    @cached_property
    def prompts(self) -> Prompts:
        """The base model's tokenizer and the chat template of the run. UserError without a tokenizer."""
        tokenizer = self.checkpoint.tokenizer().with_special_tokens(special_tokens_of(self.folder))
        return Prompts(tokenizer, template_for(tokenizer, self.folder))

    @cached_property
    def effect(self) -> dict[str, WeightChange]:
        return effect_of(self.lora, self.tensors)

    @cached_property
    def scales(self) -> dict[str, float]:
        """The scale of each module: alpha / r, as modified by rsLoRA and patterns."""
        return {module: change.scale for module, change in self.effect.items()}

    @property
    def uncommon_settings(self) -> list[str]:
        """The settings of this adapter that not every loader supports."""
        settings = ("use_rslora", "rank_pattern", "alpha_pattern")
        return [name for name in settings if getattr(self.lora, name)]


def open_source(
    adapter: str, model: str | None, needs_model: bool, options: ModelOptions | None = None
) -> ExportSource:
    """Read the adapter, and open the base model: `model`, or if one is needed, the one that the adapter names.

    options: what the user says about it, in addition to what the adapter's run keeps.
    Raises UserError if something cannot be read, does not fit together, or is missing.
    """
    folder = Path(adapter)
    lora, tensors = read_adapter(folder)
    named = named_base(folder)
    if model is None and not needs_model:
        return ExportSource(folder, lora, tensors, named, None)
    model = base_for(folder, model)
    try:
        checkpoint = open_checkpoint(model, options, kept_options(folder))
    except UserError as error:
        raise UserError(f"the base model {model}: {error}") from None
    checkpoint = extended_for(checkpoint, folder)
    lora, tensors = read_adapter(folder, checkpoint.config)
    return ExportSource(folder, lora, tensors, named or checkpoint.name, checkpoint)
