"""The end of a run, in words: why it stopped, the loss it reached, and where its adapters are."""

from pathlib import Path
from statistics import fmean

from lorawgpu.files.run_folder import METRICS_FILE, checkpoint_name
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.resume import TrainerState
from lorawgpu.train.setup import Run


def why_over(run: Run, state: TrainerState) -> str | None:
    """Why the run is over, and how to continue it; None while steps are left."""
    total, patience = run.schedule.total_steps, run.config.early_stopping_patience
    if state.step >= total:
        return f"step {state.step} is the last one; raise max_steps or num_epochs to continue"
    if patience is not None and state.evals_since_best >= patience:
        return (
            f"stopped early after step {state.step} of {total}: {state.evals_since_best} evaluations in a row without "
            "a better held-out loss; raise early_stopping_patience to continue"
        )
    return None


def stopped_blind(run: Run, state: TrainerState) -> bool:
    """Whether the run was stopped early by held-out losses that are not finite."""
    early = state.step < run.schedule.total_steps and why_over(run, state) is not None
    return early and "eval_loss" in state.metrics and state.metrics["eval_loss"] is None


def missing_records(metrics: Path, found: int, state: TrainerState) -> str | None:
    """A note if the metrics file has lost records that it had when the checkpoint was saved."""
    if found >= state.logged:
        return None
    return f"{metrics}: {state.logged - found} of the {state.logged} records up to step {state.step} are gone"


def base_loss(metrics: Path) -> float | None:
    """The held-out loss of the base model, if the run measured it before its first step."""
    return next((r["base_eval_loss"] for r in read_metrics(metrics) if r.get("base_eval_loss") is not None), None)


def compared_to_base(loss: float, base: float | None) -> str:
    """A remark for a held-out loss that is not better than the base model's, else ""."""
    return "" if base is None or loss < base else f", not better than the {base:.4f} before training"


def risen(losses: list[float], rate: float) -> str:
    """A remark for a run whose training loss, the mean of its last tenth, is above that of its first, else ""."""
    tenth = max(1, len(losses) // 10)
    if len(losses) < 2 or (last := fmean(losses[-tenth:])) <= (first := fmean(losses[:tenth])):
        return ""
    return (
        f"\nthe training loss rose, from {first:.4f} in the first tenth of the run to {last:.4f} in the last: lower "
        f"learning_rate ({rate:g}), or raise warmup_steps or the number of tokens per step"
    )


def summary(run: Run, state: TrainerState, steps: str, base: float | None) -> str:
    """The last lines that a run prints. `steps`: what it did in this process."""
    early = (why := why_over(run, state)) and state.step < run.schedule.total_steps
    text = steps
    if state.bad.bad_total:
        text += f"; {state.bad.bad_total} steps were not finite and were skipped"
    if state.skipped:
        text += f"; {state.skipped} steps without a target were skipped"
    if early:
        text += f"\n{why}"
    records = read_metrics(run.folder / METRICS_FILE)
    losses = [r["loss"] for r in records if "learning_rate" in r and r.get("loss") is not None]
    text += risen(losses, run.config.learning_rate)
    which = f"of step {state.step}"
    if best := state.best:
        path = run.folder / checkpoint_name(best["step"])
        note = compared_to_base(best["loss"], base)
        text += f"\nbest held-out loss {best['loss']:.4f} at step {best['step']}{note}: {path}"
        which += ", the best" if best["step"] == state.step else f"; the best one is in {path.name}"
    return f"{text}\nadapter: {run.folder} ({which})"
