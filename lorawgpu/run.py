"""From a config to what the loop needs: data, model, adapter, schedule, engine; and the plan that is printed first.

`prepare` touches no GPU and finds every mistake that can be found without one; `build_engine` puts it all on a device.
"""

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .config import TrainConfig
from .data.batching import Batches, BatchSettings, token_capacity
from .data.cache import default_cache_dir
from .data.chat import resolve_template
from .data.dataset import Data, DatasetSpec, Loading, load
from .data.encode import EncodeSettings
from .data.tokenizer import Tokenizer
from .engine import Engine, Options
from .errors import UserError
from .model.adapter import start_adapter
from .model.adapter_layout import AdapterLayout
from .model.layers import load_model
from .model.loader import Checkpoint, open_checkpoint
from .model.peft_config import LoraConfig
from .optim.adamw import AdamW
from .optim.schedule import Schedule, schedule_of


@dataclass(frozen=True)
class Run:
    """A run before it has a GPU. `start`: the adapter before the first step; `capacity`: rows of a micro-batch."""

    config: TrainConfig
    checkpoint: Checkpoint
    data: Data
    batches: Batches
    schedule: Schedule
    lora: LoraConfig
    start: dict[str, np.ndarray]
    identity: dict  # what a checkpoint must have been made with to be resumed by this run
    longest: int  # tokens of the longest sample, held-out ones included

    @property
    def capacity(self) -> int:
        return self.batches.settings.capacity

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)


def open_tokenizer(checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """The model's tokenizer, or None and why: pre-tokenised data need none."""
    try:
        return checkpoint.tokenizer(), ""
    except UserError as error:
        return None, str(error)


def load_data(config: TrainConfig, checkpoint: Checkpoint, skip_bad_lines: bool = False) -> Data:
    """The data sets of a config, tokenised and split. UserError naming file and line for what is wrong with them."""
    tokenizer, missing = open_tokenizer(checkpoint)
    own, special = (tokenizer.chat_template, tokenizer.special_tokens) if tokenizer else (None, {})
    template = resolve_template(config.chat_template, config.chat_template_jinja, own, special)
    settings = EncodeSettings(
        config.sequence_len, config.excess_length_strategy, config.train_on_inputs, tuple(config.roles_to_train)
    )
    loading = Loading(
        settings,
        tokenizer,
        template,
        checkpoint.config.vocab_size,
        skip_bad_lines,
        Path(config.dataset_prepared_path) if config.dataset_prepared_path else default_cache_dir(),
        config.dataset_num_proc or os.cpu_count() or 1,
    )

    def specs(sets):
        return [DatasetSpec(d.path, d.type, d.weight) for d in sets]

    try:
        return load(specs(config.datasets), loading, config.val_set_size, config.seed, specs(config.test_datasets))
    except UserError as error:
        if tokenizer is None:
            raise UserError(f"{error}\n  tokenizer: {missing}") from None
        raise


def prepare(config: TrainConfig, skip_bad_lines: bool = False) -> Run:
    """Everything that needs no GPU. UserError for what is wrong with the model, the data or the adapter."""
    checkpoint = open_checkpoint(config.base_model)
    lora, start = start_adapter(config, checkpoint.config)
    data = load_data(config, checkpoint, skip_bad_lines)
    sources = data.train + ([data.validation] if data.validation is not None else [])
    longest = max(int(np.max(s.lengths)) for s in sources if len(s))
    # Packing fills what the config says; without it no micro-batch outgrows the longest samples.
    rows = config.sequence_len if config.sample_packing else longest
    settings = BatchSettings(
        config.seed,
        config.micro_batch_size,
        config.gradient_accumulation_steps,
        token_capacity(config.micro_batch_size, rows),
        config.sample_packing,
    )
    batches = Batches(data.train, settings, data.weights)
    schedule = schedule_of(config, total_steps(config, batches))
    identity = config.resume_identity() | {"model": model_digest(checkpoint), "data": data.digest}
    return Run(config, checkpoint, data, batches, schedule, lora, start, identity, longest)


def total_steps(config: TrainConfig, batches: Batches) -> int:
    """`max_steps`, else the optimizer steps of `num_epochs`; a part of an epoch is rounded up to a step."""
    if config.max_steps:
        return config.max_steps
    whole = int(config.num_epochs)
    part = config.num_epochs - whole
    return sum(batches.steps(e) for e in range(whole)) + (math.ceil(part * batches.steps(whole)) if part else 0)


def model_digest(checkpoint: Checkpoint) -> str:
    """Tells models apart in milliseconds: the config, and of each weight file its size and 64 pieces of 4 KiB."""
    hashed = hashlib.blake2b(repr(checkpoint.config).encode(), digest_size=16)
    path = Path(checkpoint.path)
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        hashed.update(str(size).encode())
        with file.open("rb") as stream:
            for i in range(64):
                stream.seek(size * i // 64)
                hashed.update(stream.read(4096))
    return hashed.hexdigest()


def build_engine(run: Run, device) -> Engine:
    """The model on the device and the plan of the largest micro-batch recorded; its memory is known after that."""
    config = run.config
    options = Options(
        capacity=run.capacity,
        positions=run.longest,
        dropout=config.lora_dropout,
        seed=config.seed,
        checkpointing=config.gradient_checkpointing,
        attention=config.attn_implementation,
    )
    optimizer = AdamW(
        config.adam_beta1, config.adam_beta2, config.adam_epsilon, config.weight_decay, config.max_grad_norm
    )
    model = load_model(device, run.checkpoint)
    layout = AdapterLayout(run.lora, run.checkpoint.config)
    return Engine(device, model, options, layout, run.start, optimizer)
