"""From what a user asks for to a trainer that is ready for its first step: config, checkpoint, data, device, plan.

The processes of a job do this together, so that an error of one of them ends all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from lorawgpu.config.load import load_config_and_notes
from lorawgpu.config.schema import TrainConfig
from lorawgpu.config.translate import Notes
from lorawgpu.engine.exchange import Exchange
from lorawgpu.gpu import device_errors, open_device, open_dry_device
from lorawgpu.train.border import Ask
from lorawgpu.train.checkpoint import Snapshot
from lorawgpu.train.fit import CardMemory, picked_before, picked_for, picked_lines
from lorawgpu.train.identity import start_digest
from lorawgpu.train.placement import build_engine
from lorawgpu.train.ranks import config_values, from_leader, in_turns, require_same, together
from lorawgpu.train.resume import check_same_run, load_snapshot, software, today_of
from lorawgpu.train.run_dir import checkpoint_to_resume, why_refused
from lorawgpu.train.setup import Run, cache_dir, prepare, settle
from lorawgpu.train.shares import balanced
from lorawgpu.train.summary import plan_text
from lorawgpu.train.trainer import Trainer
from lorawgpu.util.printable import printable


@dataclass(frozen=True)
class Job:
    """What a user asks for: `source`, a config file or a dict of its keys, and the options of `lorawgpu train`."""

    source: str | Path | Mapping
    overrides: Sequence[str] = ()
    resume: str | None = None
    device: str | None = None
    memory: CardMemory | None = None
    skip_bad_lines: bool = False
    dry_run: bool = False
    on_step: Ask | None = None

    @property
    def config_path(self) -> Path | None:
        return None if isinstance(self.source, Mapping) else Path(self.source)


def read_job_config(job: Job, exchange: Exchange) -> tuple[TrainConfig, Notes]:
    """The config, which must be the same on all processes, and what to tell about it."""
    config, notes = together(exchange, lambda: load_config_and_notes(job.source, job.overrides))
    exchange.set_timeout(config.exchange_timeout_s)
    require_same(exchange, "versions", software())
    require_same(exchange, "config", config_values(config))
    return config, notes


def ready_trainer(config: TrainConfig, job: Job, exchange: Exchange, notes: Notes) -> Trainer:
    """A trainer on its device, its plan printed. In a dry run nothing is allocated or written."""
    # A dry run writes nothing, so it may plan a new run in a folder that already holds one.
    fresh = job.dry_run and job.resume is None
    path, snapshot = from_leader(exchange, lambda: (None, None) if fresh else found_checkpoint(config, job))
    prepared = picked_run(config, job, exchange, path, snapshot)
    opener = open_dry_device if job.dry_run else partial(open_device, matrix_cores=config.matrix_cores)
    device = together(exchange, lambda: opener(job.device or config.device, local_rank=exchange.local_rank))
    exchange.introduce(device.name)
    prepared = together(exchange, lambda: settled_on(device, prepared))
    engine = together(exchange, lambda: build_engine(prepared, device, exchange=exchange))
    if config.micro_batches_per_rank == "auto" and not job.dry_run:
        prepared = balanced(prepared, engine, snapshot)
    trainer = together(exchange, lambda: Trainer(prepared, engine, snapshot, job.config_path, job.on_step))
    print(printable(plan_text(trainer.plan)), flush=True)
    if lines := notes.lines(sum(tensor.size for tensor in prepared.start.values())):
        print(printable("note     " + "\n         ".join(lines)), flush=True)
    print(printable(f"output   {prepared.folder}" + (f", resumed from {path}" if path else "")), flush=True)
    if job.resume and not path:
        print(f"resume   no checkpoint in {prepared.folder}: starting at step 1", flush=True)
    if fresh and (reason := why_refused(prepared.folder, job.config_path, resuming=False)):
        print(f"note     the real run would be refused: {reason}")
    return trainer


def found_checkpoint(config: TrainConfig, job: Job) -> tuple[Path | None, Snapshot | None]:
    """Where the run continues from, and what is there."""
    path = checkpoint_to_resume(Path(config.output_dir), job.resume, job.config_path)
    return path, load_snapshot(path) if path else None


def prepared_in_turns(
    config: TrainConfig, job: Job, exchange: Exchange, path: Path | None, snapshot: Snapshot | None
) -> Run:
    """Tokenize once on each file system; then the processes compare what they have."""
    today = today_of(snapshot) if snapshot else None if exchange.size == 1 else from_leader(exchange, datetime.now)
    prepared = in_turns(
        exchange,
        lambda: prepare(config, job.skip_bad_lines, today, job.dry_run, path, exchange.size),
        cache_dir(config),
    )
    if exchange.size > 1:  # the identity waits until the model's files are hashed
        require_same(exchange, "model, data or adapter", prepared.identity | {"start": start_digest(prepared.start)})
    return prepared


def picked_run(config: TrainConfig, job: Job, exchange: Exchange, path: Path | None, snapshot: Snapshot | None) -> Run:
    """The run with the settings that `--memory` picks, or picked when the run to resume began."""
    picked = picked_before(snapshot)
    prepared = prepared_in_turns(config.model_copy(update=picked), job, exchange, path, snapshot)
    if snapshot:
        together(exchange, lambda: check_same_run(prepared, snapshot, path))

    def pick() -> dict:
        device = open_dry_device(job.device or config.device, local_rank=exchange.local_rank)
        return picked_for(prepared, job.memory, device, resuming=bool(snapshot))

    if job.memory:
        picked = from_leader(exchange, pick)
        prepared = prepared_in_turns(config.model_copy(update=picked), job, exchange, path, snapshot)
    if picked and exchange.leads:
        print(picked_lines(config, prepared.config, job.memory), flush=True)
    return replace(prepared, picked=picked)


def settled_on(device, prepared: Run) -> Run:
    with device_errors():
        return settle(prepared, device)
