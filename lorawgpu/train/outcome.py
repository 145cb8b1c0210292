"""How a run ends, in words: why no step follows, what was reached, and which adapter lies where."""

from pathlib import Path

from lorawgpu.files.run_folder import checkpoint_name
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.resume import TrainerState
from lorawgpu.train.setup import Run


def why_over(run: Run, state: TrainerState) -> str | None:
    """Why no step follows this one, and what would make one; None while steps are left."""
    total, patience = run.schedule.total_steps, run.config.early_stopping_patience
    if state.step >= total:
        return f"step {state.step} is the last one; raise max_steps or num_epochs to go on"
    if patience is not None and state.evals_since_best >= patience:
        return (
            f"stopped early after step {state.step} of {total}: {state.evals_since_best} evaluations in a row without a "
            "better held-out loss; raise early_stopping_patience to go on"
        )
    return None


def base_loss(metrics: Path) -> float | None:
    """The held-out loss of the bare base model, where a run took it before its first step."""
    return next((r["base_eval_loss"] for r in read_metrics(metrics) if r.get("base_eval_loss") is not None), None)


def compared_to_base(loss: float, base: float | None) -> str:
    """What has to be said of a held-out loss that is no better than that of the base model."""
    return "" if base is None or loss < base else f", no better than the base model's {base:.4f}"


def summary(run: Run, state: TrainerState, steps: str, base: float | None) -> str:
    """The last words of a run. `steps`: what it did in this process."""
    early = (why := why_over(run, state)) and state.step < run.schedule.total_steps
    text = steps
    if state.bad.bad_total:
        text += f"; {state.bad.bad_total} steps were not finite and changed nothing"
    if state.skipped:
        text += f"; {state.skipped} steps without a target were skipped"
    if early:
        text += f"\n{why}"
    which = f"of step {state.step}"
    if best := state.best:
        path = run.folder / checkpoint_name(best["step"])
        note = compared_to_base(best["loss"], base)
        text += f"\nbest held-out loss {best['loss']:.4f} at step {best['step']}{note}: {path}"
        which += ", which is the best" if best["step"] == state.step else f"; the best one is that of {path.name}"
    return f"{text}\nadapter: {run.folder} ({which})"
