"""From a config to what the training loop needs: data, model, adapter, schedule.

`prepare` touches no GPU and finds every mistake that can be found without one; train/placement.py puts it on a device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lorawgpu.chat.template import GuardedTemplate, resolve_template
from lorawgpu.config.model_options import kept_options
from lorawgpu.config.schema import TrainConfig
from lorawgpu.data.batch_order import Batches, BatchSettings
from lorawgpu.data.batching import token_capacity
from lorawgpu.data.configurations import Within
from lorawgpu.data.dataset import Data, DatasetSpec, LoadSettings, load
from lorawgpu.data.encode import EncodeSettings, NeedsTokenizer
from lorawgpu.data.slices import Shard
from lorawgpu.data.workers import default_workers
from lorawgpu.engine.readings import settled
from lorawgpu.errors import UserError
from lorawgpu.files.paths import default_cache_dir
from lorawgpu.lora.base_name import note_other_base
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.lora.peft_dir import start_adapter
from lorawgpu.optim.schedule import Schedule, schedule_of
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.train.identity import adapter_identity, model_digest, start_digest
from lorawgpu.train.loggers import require_loggers
from lorawgpu.train.new_tokens import check_trained, extend, with_tokens
from lorawgpu.util.later import Later
from lorawgpu.weights.extended import extended_for, folder_of_tokenizer
from lorawgpu.weights.hf_folder import read_config
from lorawgpu.weights.loader import Checkpoint, open_checkpoint
from lorawgpu.weights.quantized import QuantizedAtLoad


@dataclass(frozen=True)
class TextSetup:
    """What data loading needs of a model: tokenizer (`missing`: why there is none), chat template, vocabulary size."""

    tokenizer: GuardedTokenizer | None
    missing: str
    template: GuardedTemplate | None
    vocab_size: int | None


@dataclass(frozen=True)
class Intervals:
    """Steps between two logs, evaluations (None: no evaluations) and checkpoints."""

    log: int
    eval: int | None
    save: int


@dataclass(frozen=True)
class Run:
    """A run that is not on a GPU yet. `start`: the initial adapter; `capacity`: rows of the largest micro-batch."""

    config: TrainConfig
    checkpoint: Checkpoint
    text: TextSetup
    data: Data
    batches: Batches
    schedule: Schedule
    intervals: Intervals
    lora: LoraConfig
    start: dict[str, np.ndarray]
    longest: int  # tokens of the longest sample, held-out ones included
    model_digest: Later[str]
    shares: tuple[int, ...] = (1,)  # micro-batches of each process in a full step
    picked: dict[str, Any] = field(default_factory=dict)  # the settings that `--memory` picked

    @property
    def capacity(self) -> int:
        return self.batches.settings.capacity

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed by this run. Waits until the model's files are hashed."""
        wanted = self.config.resume_identity() | adapter_identity(self.lora)
        start = start_digest(self.start) if self.config.start_from else None
        wanted["gradient_accumulation_steps"] = sum(self.shares)
        return wanted | {"model": self.model_digest.result(), "data": self.data.digest, "adapter": start}


def text_setup(config: TrainConfig, tokenizer: Callable[[], GuardedTokenizer], vocab_size: int | None) -> TextSetup:
    """A model without a tokenizer is enough for pre-tokenized data."""
    try:
        found, missing = tokenizer(), ""
    except UserError as error:
        found, missing, own, tool_use, special = None, str(error), None, None, {}
    else:
        found = found.with_special_tokens(config.special_tokens.chosen())
        own, tool_use, special = found.chat_template, found.tool_use_template, found.special_tokens
    name, jinja = config.chat_template, config.chat_template_jinja
    tool_use = None if name or jinja else tool_use
    template = resolve_template(name, jinja, own, special, config.chat_template_kwargs, tool_use)
    return TextSetup(found, missing, template, vocab_size)


def text_setup_of_model(config: TrainConfig, checkpoint: Checkpoint) -> TextSetup:
    """The text setup of an opened checkpoint."""
    return text_setup(config, checkpoint.tokenizer, checkpoint.config.vocab_size)


def text_setup_without_weights(config: TrainConfig) -> TextSetup:
    """The text setup for a preview: a model folder needs a tokenizer, but no weights."""
    folder = Path(config.base_model)
    if not folder.is_dir():
        options, kept = config.overrides_of_model_config, kept_options(config.start_from)
        checkpoint = extended_for(open_checkpoint(config.base_model, options, kept), config.start_from)
        return text_setup_of_model(config, extend(config, checkpoint)[0])
    rows = read_config(folder).vocab_size if (folder / "config.json").exists() else None
    own = folder_of_tokenizer(Path(config.start_from)) if config.start_from else None
    return text_setup(
        config, lambda: with_tokens(config, GuardedTokenizer.from_hf_folder(own or folder, rows), rows), rows
    )


def cache_dir(config: TrainConfig) -> Path:
    """The folder of the token cache."""
    return Path(config.dataset_prepared_path) if config.dataset_prepared_path else default_cache_dir()


def load_data(
    config: TrainConfig,
    text: TextSetup,
    skip_bad_lines: bool = False,
    purpose: str = LoadSettings.purpose,
    read_only: bool = False,
) -> Data:
    """The data sets of a config, tokenized and split. Raises UserError, with file and line, for bad data."""
    settings = EncodeSettings(
        config.sequence_len, config.excess_length_strategy, config.train_on_inputs, tuple(config.roles_to_train)
    )
    loading = LoadSettings(
        settings,
        text.tokenizer,
        text.template,
        text.vocab_size,
        skip_bad_lines,
        cache_dir(config),
        config.dataset_num_proc or default_workers(text.tokenizer.vocab_size if text.tokenizer else 0),
        purpose,
        read_only,
    )

    def specs(sets):
        return [
            DatasetSpec(
                d.path, d.type, d.weight, d.split, d.renaming(),
                None if d.roles_to_train is None else tuple(d.roles_to_train), d.train_on_eos,
                Shard(d.shards, d.shards_idx, config.seed) if d.shards else None,
                Within(name, d.revision, tuple(d.data_files), d.ds_type),
            ) for d in sets for name in d.name or [None]
        ]  # fmt: skip

    try:
        return load(specs(config.datasets), loading, config.val_set_size, config.seed, specs(config.test_datasets))
    except NeedsTokenizer as error:
        raise UserError(f"{error}: {text.missing}") from None


def prepare(
    config: TrainConfig,
    skip_bad_lines: bool = False,
    today: datetime | None = None,
    read_only: bool = False,
    resumed: Path | None = None,
    ranks: int = 1,
) -> Run:
    """Everything that needs no GPU, for each of `ranks` processes. Raises UserError for a bad model, data set or
    adapter.

    `today`: the date for chat templates that ask for it (default: now). `read_only`: do not write to the token cache.
    `resumed`: the checkpoint that the run continues from.
    """
    require_loggers(config.report_to)
    kept = {**kept_options(config.start_from), **kept_options(resumed)}
    checkpoint = open_checkpoint(config.base_model, config.overrides_of_model_config, kept)
    config = _with_options(config, checkpoint)
    checkpoint, new_tokens = extend(config, extended_for(checkpoint, config.start_from))
    if config.quantize_to and not (config.load_in_4bit and checkpoint.in_4bit):
        checkpoint = QuantizedAtLoad(checkpoint, *config.quantize_to)
    lora, start = start_adapter(config, checkpoint.config, checkpoint.rows)
    check_trained(new_tokens, lora, checkpoint.config)
    if config.start_from:
        note_other_base(config.start_from, checkpoint.name)
    text = text_setup_of_model(config, checkpoint)
    if today and text.template:
        text = replace(text, template=text.template.at(today))
    data = load_data(config, text, skip_bad_lines, read_only=read_only)
    if problems := config.evaluation_problems(data.validation is not None):
        raise UserError("; ".join(problem for _, problem in problems))
    sources = data.train + ([data.validation] if data.validation is not None else [])
    longest = max(int(np.max(s.lengths)) for s in sources if len(s))
    # Packing fills rows up to sequence_len; without it, no row is longer than the longest sample.
    rows = config.sequence_len if config.sample_packing else longest
    shares = shares_of(config, ranks)
    settings = BatchSettings(
        config.seed,
        config.micro_batch_size,
        sum(shares),
        token_capacity(config.micro_batch_size, rows),
        config.sample_packing,
    )
    batches = Batches(data.train, settings, data.weights)
    schedule = schedule_of(config, total_steps(config, batches))
    if config.warmup_steps > schedule.total_steps:
        raise UserError(
            f"warmup_steps {config.warmup_steps} is more than the {schedule.total_steps} steps of this run: the warmup "
            "would never end; lower warmup_steps, or raise num_epochs"
        )
    intervals = intervals_of(config, schedule.total_steps, batches.steps(0))
    digest = Later(partial(model_digest, checkpoint))
    return Run(config, checkpoint, text, data, batches, schedule, intervals, lora, start, longest, digest, shares)


def shares_of(config: TrainConfig, ranks: int) -> tuple[int, ...]:
    """Micro-batches of each process in a full step. `auto` begins with equal shares."""
    per_rank = config.micro_batches_per_rank
    if not isinstance(per_rank, list):
        return (config.gradient_accumulation_steps,) * ranks
    if len(per_rank) != ranks:
        raise UserError(
            f"micro_batches_per_rank has {len(per_rank)} entries; wanted {ranks}, one for each process: change it, or "
            f"start as many processes (mpiexec -n {len(per_rank)} lorawgpu train ...)"
        )
    return tuple(per_rank)


def _with_options(config: TrainConfig, checkpoint: Checkpoint) -> TrainConfig:
    """The config that says of the model what its checkpoint was told."""
    if checkpoint.options == config.overrides_of_model_config:
        return config
    return config.model_copy(update={"overrides_of_model_config": dict(checkpoint.options)})


def settle(run: Run, device) -> Run:
    """The run with the right one of the ways in which its model may be read. Raises UserError as `settled`."""
    checkpoint = settled(device, run.checkpoint)
    if checkpoint is run.checkpoint:
        return run
    digest = Later(partial(model_digest, checkpoint))
    return replace(run, config=_with_options(run.config, checkpoint), checkpoint=checkpoint, model_digest=digest)


def total_steps(config: TrainConfig, batches: Batches) -> int:
    """`max_steps`, or the optimizer steps of `num_epochs`, a fraction of an epoch rounded up to whole steps."""
    if config.max_steps:
        return config.max_steps
    whole = int(config.num_epochs)
    part = config.num_epochs - whole
    return sum(batches.steps(e) for e in range(whole)) + (math.ceil(part * batches.steps(whole)) if part else 0)


def intervals_of(config: TrainConfig, total: int, epoch: int) -> Intervals:
    """In steps, of which the run has `total` and an epoch `epoch`; fractions are rounded up, as in transformers."""

    def steps(every: float | None, per_epoch: int | None = None) -> int | None:
        if per_epoch:
            return math.ceil(epoch / per_epoch)
        return math.ceil(every * total) if every and every < 1 else every

    return Intervals(
        steps(config.logging_steps),
        steps(config.eval_steps, config.evals_per_epoch),
        steps(config.save_steps, config.saves_per_epoch),
    )
