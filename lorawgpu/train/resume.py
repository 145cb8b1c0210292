"""The state of a run between two steps: to a checkpoint and back."""

import dataclasses
import hashlib
import importlib.metadata
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from lorawgpu import __version__
from lorawgpu.data.batch_order import DataPosition
from lorawgpu.engine.engine import Engine
from lorawgpu.errors import UserError
from lorawgpu.gpu.kernel import SHADERS
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.ops.step_state import StepState, pack_state
from lorawgpu.train.checkpoint import FORMAT, Snapshot, differences, load_checkpoint, require_same
from lorawgpu.train.identity import adapter_identity
from lorawgpu.train.setup import Run

# Settings that may differ when a run is resumed; they change how it goes on.
MUTABLE_ON_RESUME = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "attn_implementation", "cosine_constant_lr_ratio",
    "cosine_min_lr_ratio", "gradient_checkpointing", "learning_rate", "lr_scheduler", "lr_scheduler_kwargs",
    "max_grad_norm", "max_steps", "num_epochs", "warmup_ratio", "warmup_steps", "weight_decay",
)  # fmt: skip
GOOD = StepState(bad=False, bad_run=0, bad_total=0, record=None, steps=0)


@dataclass
class TrainerState:
    """Host state after `step` optimizer steps; all of it goes into a checkpoint."""

    step: int = 0
    data: DataPosition | None = None  # after the last finished step; None before the first
    skipped: int = 0  # steps without a target
    bad: StepState = GOOD  # as of the last report
    best: dict | None = None  # {"step", "loss"} of the best evaluation
    evals_since_best: int = 0
    evaluation_due: bool = False  # an evaluation after `step` was interrupted
    metrics: dict = field(default_factory=dict)  # as last logged; None for a value that is not finite
    logged: int = 0  # records in the metrics file

    def to_json(self) -> dict:
        """The keys are part of the checkpoint format; a change of them is another FORMAT."""
        return {
            "format": FORMAT,
            "step": self.step,
            "epoch": self.data.epoch,
            "data": self.data.to_dict(),
            "skipped_windows": self.skipped,
            "bad_steps": {"run": self.bad.bad_run, "total": self.bad.bad_total, "windows": self.bad.steps},
            "best": self.best,
            "evaluations_since_best": self.evals_since_best,
            "evaluation_due": self.evaluation_due,
            "metrics": self.metrics,
            "logged": self.logged,
        }

    @staticmethod
    def from_json(state: dict) -> "TrainerState":
        bad = state["bad_steps"]
        return TrainerState(
            state["step"],
            DataPosition.from_dict(state["data"]),
            state["skipped_windows"],
            StepState(False, bad["run"], bad["total"], None, bad["windows"]),
            state["best"],
            state["evaluations_since_best"],
            state["evaluation_due"],
            state["metrics"],
            state["logged"],
        )


def software() -> dict[str, str]:
    """The versions that may change rounding or the order of data, and a digest of the kernels."""
    kernels = hashlib.blake2b(digest_size=16)
    for file in sorted(SHADERS.rglob("*.wgsl*")):
        kernels.update(file.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "wgpu")}
    return {"lorawgpu": __version__, "kernels": kernels.hexdigest()} | versions


def environment(engine: Engine) -> dict[str, Any]:
    """Whatever may legitimately change rounding: software, devices and drivers, who computes what."""
    devices, drivers = zip(*engine.exchange.gather([engine.device.name, engine.device.driver]), strict=True)
    ranks = {"micro_batches_per_rank": list(engine.options.shares)} if engine.exchange.size > 1 else {}
    cores = engine.device.matrix
    products = {"matrix_cores": dataclasses.asdict(cores)} if cores else {}
    return software() | {"device": "; ".join(devices), "driver": "; ".join(drivers)} | products | ranks


def load_snapshot(path: Path) -> Snapshot:
    """Read a checkpoint. UserError when it is incomplete, or in another format than this version writes."""
    snapshot = load_checkpoint(path)
    try:
        for key in ("identity", "data_files", "environment", "config", "today"):
            snapshot.state[key]
        TrainerState.from_json(snapshot.state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: {error} is missing or malformed in its state; was it written by another version?"
        ) from None
    return snapshot


def today_of(snapshot: Snapshot) -> datetime | None:
    """The time that chat templates take as now: a run resumed tomorrow must render its data as it did today."""
    today = snapshot.state["today"]
    return datetime.fromisoformat(today) if today else None


def check_same_run(run: Run, snapshot: Snapshot, path: Path) -> None:
    """Raises UserError, naming every difference, if the checkpoint was made with another model, data or adapter, or if
    it is beyond the last step of this run."""
    reasons = {
        "data": _data_difference(snapshot.state["data_files"], run.data.files),
        "adapter": "the checkpoint's run and this one continue from different adapters, or one of them from none",
    }
    require_same(snapshot.state["identity"], run.identity, path, reasons)
    _require_own_adapter(run, snapshot, path)
    step, total = snapshot.state["step"], run.schedule.total_steps
    if step > total:
        raise UserError(
            f"{path}: already at step {step}, but this run has only {total} steps: raise max_steps or num_epochs, "
            "or choose another output_dir to start a new run"
        )


def _require_own_adapter(run: Run, snapshot: Snapshot, path: Path) -> None:
    """UserError if the files of a checkpoint hold another adapter than its state says, though they are sealed."""

    def described(lora: LoraConfig, tensors: dict[str, np.ndarray]) -> tuple:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return shapes, adapter_identity(lora) | {"lora_target_modules": None}  # PEFT has several ways to name them

    if described(snapshot.lora, snapshot.adapter) != described(run.lora, run.start):
        raise UserError(f"{path}: its adapter has other tensors, rank or alpha than this run; resume from another one")


def _data_difference(saved: dict[str, str], current: dict[str, str]) -> str:
    """Why the data differ from the checkpoint's, from the file digests of both."""
    parts = [f"{file} has changed" for file in saved if current.get(file, saved[file]) != saved[file]]
    parts += [f"{file} is no longer used" for file in saved if file not in current]
    parts += [f"{file} is new" for file in current if file not in saved]
    same = "the same files, but processed differently (tokenizer, chat template, type, weight or held-out split)"
    return "; ".join(parts) or same


def restore(engine: Engine, snapshot: Snapshot) -> TrainerState:
    """Upload a snapshot, bad-step counters included; returns the trainer's state."""
    state = TrainerState.from_json(snapshot.state)
    for part, tensors in (("params", snapshot.adapter), ("m", snapshot.m), ("v", snapshot.v)):
        engine.load(part, tensors)
    engine.device.write(engine.state, pack_state(state.bad))
    return state


def resume_notes(run: Run, snapshot: Snapshot, engine: Engine) -> list[str]:
    """Why the resumed run will not be bit-identical to an uninterrupted one; empty if it will be."""
    config = {key: value for key, value in run.config.model_dump().items() if key in MUTABLE_ON_RESUME}
    changed = differences({key: snapshot.state["config"].get(key) for key in MUTABLE_ON_RESUME}, config)
    return changed + differences(snapshot.state["environment"], environment(engine))


def take_snapshot(run: Run, engine: Engine, state: TrainerState) -> Snapshot:
    """Read the adapter and its moments back, from all processes; waits for the GPU."""
    values = state.to_json() | {
        "identity": run.identity,
        "data_files": run.data.files,
        "environment": environment(engine),
        "config": run.config.model_dump(),
        "picked": run.picked,
        "today": run.text.template.now.isoformat() if run.text.template else None,
    }
    parts: list[dict[str, np.ndarray]] = [engine.tensors(part) for part in ("params", "m", "v")]
    return Snapshot(run.lora, *parts, values)
