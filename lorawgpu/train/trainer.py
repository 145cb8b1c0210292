"""The training loop: batches of a step -> engine -> log -> evaluate -> checkpoint."""

import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lorawgpu.data.batch_order import StepBatch
from lorawgpu.data.prefetch import Prefetch
from lorawgpu.data.source_lines import describe_lines
from lorawgpu.engine.engine import Engine
from lorawgpu.engine.evaluation import Evaluation
from lorawgpu.errors import CheckFailed, DeviceError, UserError, explain
from lorawgpu.files.run_folder import METRICS_FILE, checkpoint_name
from lorawgpu.gpu import device_errors
from lorawgpu.gpu.submit_budget import flops_per_submit
from lorawgpu.tokenizer.save import save_tokenizer
from lorawgpu.train.border import Ask, Border
from lorawgpu.train.checkpoint import Snapshot, newest_checkpoint, prune_checkpoints, save_checkpoint
from lorawgpu.train.evaluator import Evaluator, Stopped
from lorawgpu.train.final_adapter import save_final, try_out
from lorawgpu.train.interrupt import Interrupts, exit_code
from lorawgpu.train.loggers import open_loggers
from lorawgpu.train.metrics import SAVING, MetricsLog, NoLog, Progress, now
from lorawgpu.train.outcome import base_loss, compared_to_base, missing_records, stopped_blind, summary, why_over
from lorawgpu.train.resume import TrainerState, restore, resume_notes, take_snapshot
from lorawgpu.train.run_dir import set_metrics_aside, write_config
from lorawgpu.train.samples import Samples
from lorawgpu.train.setup import Run
from lorawgpu.train.step_reports import LateReader, Report, bad_tensors, fault
from lorawgpu.train.summary import plan_of
from lorawgpu.util.progress import busy


class Trainer:
    """One run on one engine, from its start or from a snapshot. `config_path`: its config file, never written to.

    If several processes train together, only the leading one writes to disk and terminal. `on_step`: called with the
    metrics of every step, which waits for the device each time; it may return "stop" or "save".
    """

    def __init__(
        self, run: Run, engine: Engine, snapshot=None, config_path: Path | None = None, on_step: Ask | None = None
    ):
        self.run, self.engine, self.config, self.config_path = run, engine, run.config, config_path
        self.exchange = engine.exchange
        self.border = Border(self.exchange, [on_step] if on_step else [])
        self.measures = on_step is not None and self.exchange.leads  # the metrics of every step
        self.snapshot = snapshot
        with device_errors():
            self.state = restore(engine, snapshot) if snapshot else TrainerState()
            self.reader, self.samples = LateReader(engine), Samples(run, engine)
        self.evaluates = bool(self.config.sample_prompts) or run.data.validation is not None
        self._plan: dict[str, str] | None = None
        self.saved: Path | None = None  # the last checkpoint that this process wrote
        self.saved_at = self.state.step  # step of the last checkpoint
        self.pending_samples: dict[int, np.ndarray] = {}  # by step, until the step is reported
        self.work = 0.0  # operations since the last wait for the GPU
        self.since = time.perf_counter()

    @property
    def plan(self) -> dict[str, str]:
        """What the run will do. All processes must ask for it together: it measures their exchange."""
        if self._plan is None:
            self._plan = plan_of(self.run, self.engine)
        return self._plan

    def train(self) -> int:
        """Train to the end, or until asked to stop. Returns the exit code, which is not 0 after a signal.

        Raises what `on_step` raised, after saving a checkpoint; CheckFailed after too many bad steps in a row or if
        the final adapter fails its check; and DeviceError if the device fails. The last two name the last good
        checkpoint.
        """
        folder = self.run.folder
        self.progress = self._open_progress(folder)
        over = why_over(self.run, self.state)
        done = over and f"already finished: {over}"
        try:
            with device_errors(), Interrupts(self._notice) as interrupts:
                self._loop(interrupts)
                self.border.look(interrupts)
                if self.border.signum:
                    return self._interrupted(self.border.signum)
                if self.border.failure:
                    raise self.border.failure
                if self.exchange.leads:
                    with busy("writing and checking the adapter"):
                        save_final(self.run, self.engine, self._fallback())
                    self.progress.log.write(self.state.step, finished=now())
        except DeviceError as error:
            raise DeviceError(f"{error}\n{self._fallback()}") from error
        except OSError as error:  # most likely a full disk; earlier checkpoints are intact
            raise UserError(f"{explain(error, folder)}. {self._fallback()}") from error
        finally:
            self.progress.close()
        if self.exchange.leads:
            stopped = f"\nstopped after step {self.state.step}, as asked" if self.border.stops else ""
            print(summary(self.run, self.state, done or self.progress.summary() + stopped, self.base))
        if stopped_blind(self.run, self.state):
            raise CheckFailed(
                f"step {self.state.step}: the held-out loss is not finite, so early stopping had nothing to go by. "
                f"{self._remedy()}, and look at the held-out data"
            )
        return 0

    def _open_progress(self, folder: Path) -> Progress:
        """Open the log and the progress line; sets `base`, the base model's held-out loss, if it is logged."""
        self.base, total = None, self.run.schedule.total_steps
        plan, notes = self.plan, resume_notes(self.run, self.snapshot, self.engine) if self.snapshot else []
        if not self.exchange.leads:
            return Progress(NoLog(), total, self.state.step, open(os.devnull, "w"))
        folder.mkdir(parents=True, exist_ok=True)
        kept = [write_config(folder, self.config.dump_yaml(), self.config_path), set_metrics_aside(folder)]
        if self.run.checkpoint.own_tokenizer:
            save_tokenizer(folder, self.run.text.tokenizer, self.run.checkpoint.config.max_position_embeddings)
        loggers = open_loggers(self.config.report_to, folder, self.config.model_dump())
        log = MetricsLog(folder / METRICS_FILE, self.state.step or None, loggers)
        kept.append(missing_records(folder / METRICS_FILE, log.records, self.state))
        log.write(self.state.step, **({} if self.state.step else {"plan": plan}), total_steps=total, started=now())
        self.base = base_loss(folder / METRICS_FILE)
        progress = Progress(log, total, self.state.step, evaluations_left=self._evaluations_left)
        if why_over(self.run, self.state):
            progress.message("already finished; saving and checking its adapter again")
        notes = [f"resumed run will not be bit-identical: {note}" for note in notes]
        for note in filter(None, kept + notes):
            progress.message(f"note: {note}")
        return progress

    def _loop(self, interrupts: Interrupts) -> None:
        self.evaluator = Evaluator(self.run, self.engine, self.samples, self.progress, interrupts)
        with suppress(Stopped):
            if not self.state.step and self.evaluates:
                self._evaluate_base()
            if self.state.evaluation_due:
                self._evaluate()
                self._save()
            self._steps(interrupts)
        if self.state.step and (self.saved is None or self.saved.name != checkpoint_name(self.state.step)):
            self._save()

    def _steps(self, interrupts: Interrupts) -> None:
        with Prefetch(self.run.batches.step_batches(self.state.data)) as batches, self.exchange.judged(self._fallback):
            while not self._finished():
                with self.progress.waiting():
                    batch = next(batches)
                metrics = self._step(batch)
                self.border.cross(interrupts, metrics)
                if self.border.stops:
                    break
                if self.border.saves and self.saved_at != self.state.step:
                    self._save()

    def _finished(self) -> bool:
        return why_over(self.run, self.state) is not None

    def _step(self, batch: StepBatch) -> dict[str, Any]:
        """Take a step, with the log, evaluation and checkpoint that are due after it. Returns its metrics."""
        state, intervals = self.state, self.run.intervals
        lr = self.run.schedule.lr(state.step)
        state.step += 1
        divisor = self.engine.step(batch.micro_batches, state.step, lr)
        if divisor:
            self.work += sum(self.engine.flops(own) for _, own in self.engine.share(batch.micro_batches))
            self.pending_samples[state.step] = batch.samples
            self._note(self.reader.push(state.step))
        else:
            state.skipped += 1
        state.data = batch.position
        self.progress.advance(batch.tokens)
        logs = divisor and (state.step == 1 or self._due(intervals.log))
        measured = self._measured(lr, divisor) if divisor and (logs or self.measures) else {}
        if logs:
            self._log(**measured)
        epoch_ends = batch.ends_epoch or state.step == self.run.schedule.total_steps
        by_epoch = self.evaluates and epoch_ends and intervals.eval is None
        evaluates = by_epoch or self.evaluates and self._due(intervals.eval)
        improved = evaluates and self._evaluate()
        overdue = by_epoch or state.step // intervals.save > self.saved_at // intervals.save
        if improved or (overdue and self._going_well()):
            self._save()
        evaluation = {"eval_loss": state.metrics.get("eval_loss")} if evaluates and "eval_loss" in state.metrics else {}
        return {"step": state.step, "total_steps": self.run.schedule.total_steps, **measured, **evaluation}

    def _evaluations_left(self) -> int:
        """Evaluations that are still to come, by the epochs so far where they are not counted in steps."""
        step, total = self.state.step, self.run.schedule.total_steps
        if not self.evaluates or not step:
            return 0
        every = self.run.intervals.eval or step / self.run.batches.epochs(self.state.data)
        return math.ceil(total / every) - math.floor(step / every)

    def _due(self, every: int | None) -> bool:
        """Whether this step is a multiple of `every`, or the last one."""
        step = self.state.step
        return every is not None and (step % every == 0 or step == self.run.schedule.total_steps)

    # Monitoring

    def _note(self, reports: list[Report]) -> None:
        """Count and log the bad steps among reports. Raises CheckFailed after too many in a row."""
        for report in reports:
            self.state.bad = report.state
            samples = self.pending_samples.pop(report.step)
            if not report.state.bad:
                continue
            name, lines = fault(self.engine, report.state), describe_lines(map(self.run.batches.place, samples))
            self.progress.log.write(report.step, bad_step=name, bad_steps=report.state.bad_total, bad_data=lines)
            self.progress.message(f"step {report.step}: skipped, {name} is not finite; data of this step: {lines}")
            if report.state.bad_run >= self.config.max_bad_steps:
                raise CheckFailed(self._too_many(report, name, lines))

    def _too_many(self, report: Report, name: str, lines: str) -> str:
        return (
            f"{report.state.bad_run} steps in a row were not finite, the last one at step {report.step}, first in "
            f"{name}{self._non_finite_now()}. {self._remedy()}, and look at the data of that step: {lines}. "
            f"{self._fallback()}"
        )

    def _non_finite_now(self) -> str:
        tensors = bad_tensors(self.engine)
        return f" (not finite now: {tensors[0]} and {len(tensors) - 1} more tensors)" if tensors else ""

    def _remedy(self) -> str:
        rate, alpha = self.config.learning_rate, self.run.lora.alpha
        return f"Lower learning_rate ({rate:g}) or lora_alpha ({alpha:g}), raise warmup_steps"

    def _drain(self) -> Report | None:
        """Wait for the GPU and process its reports; returns the last one, or None if none was outstanding."""
        reports = self.reader.drain()
        self._note(reports)
        return reports[-1] if reports else None

    def _measured(self, lr: float, divisor: int) -> dict[str, Any]:
        """The metrics of the step just submitted; waits for the GPU. Not a number: those of a bad step."""
        report = self._drain()
        metrics = self.engine.objective.metrics(report.sums, divisor)
        if report.state.bad:
            metrics = dict.fromkeys(metrics, math.nan)
        loss, state = metrics.pop("loss"), self.state
        more = {"epoch": state.data.epoch, "bad_steps": state.bad.bad_total}
        return {"loss": loss, "lr": lr, "grad_norm": report.grad_norm, **metrics, **more}

    def _log(self, loss: float, lr: float, grad_norm: float, **more: Any) -> None:
        self.progress.logged(self.state.step, loss, lr, grad_norm, **more, gpu_bytes=self.engine.device.memory.total)
        self.state.metrics["loss"] = loss if math.isfinite(loss) else None
        self._set_pace()

    def _set_pace(self) -> None:
        """Size submits by the rate measured since the last wait for the GPU."""
        now = time.perf_counter()
        if self.work:
            rate = self.work / (now - self.since)
            self.engine.pace(flops_per_submit(rate, self.config.max_dispatch_ms))
        self.work, self.since = 0.0, now

    def _evaluate(self) -> bool:
        """Log held-out loss and sample answers. Returns whether the loss is the best so far. Raises Stopped, and the
        evaluation stays due, after a signal."""
        self._drain()
        self.state.evaluation_due = True
        samples, held_out = self.evaluator.measure()
        self.state.evaluation_due = False
        self.work, self.since = 0.0, time.perf_counter()
        if samples is not None:
            self.progress.log.write(self.state.step, samples=samples)
        return held_out is not None and self._record_evaluation(held_out)

    def _evaluate_base(self) -> None:
        """Log held-out loss and sample answers before training, of the base model or the adapter to continue from, as a
        baseline for all evaluations."""
        samples, held_out = self.evaluator.measure(base=self.config.start_from is None)
        if samples is not None:
            self.progress.log.write(0, base_samples=samples)
        if held_out is not None:
            self.base = held_out.loss
            self.progress.log.write(0, base_eval_loss=held_out.loss)
            self.progress.message(f"before: held-out loss {held_out.loss:.4f}")
        self.since = time.perf_counter()

    def _record_evaluation(self, result: Evaluation) -> bool:
        """Log an evaluation. Returns whether it is the best so far."""
        state = self.state
        best = math.isfinite(result.loss) and (state.best is None or result.loss < state.best["loss"])
        if best:
            state.best, state.evals_since_best = {"step": state.step, "loss": result.loss}, 0
        else:
            state.evals_since_best += 1
        state.metrics["eval_loss"] = result.loss if math.isfinite(result.loss) else None
        numbers = {"eval_loss": result.loss, "eval_perplexity": result.perplexity, "eval_tokens": result.tokens}
        self.progress.log.write(state.step, **numbers)
        verdict = f", the best{compared_to_base(result.loss, self.base)}" if best else ""
        self.progress.message(f"step {state.step}: held-out loss {result.loss:.4f}{verdict}")
        return best

    # Saving

    def _going_well(self) -> bool:
        """Whether the last step was finite. During a run of bad steps, earlier checkpoints must not be pruned."""
        self._drain()
        return not self.state.bad.bad_run

    def _save(self) -> None:
        """Save a checkpoint and prune old ones. Raises CheckFailed, and touches nothing, if the model is broken."""
        with self.progress.paused(SAVING), self.exchange.working(), busy("saving a checkpoint"):
            well = self._going_well()
            _, finite = try_out(self.run, self.engine)
            if not all(self.exchange.gather(finite)):
                raise CheckFailed(
                    f"step {self.state.step} not saved: with its adapter, the model computes values that are not "
                    f"finite{self._non_finite_now()}. {self._remedy()}. {self._fallback()}"
                )
            self.progress.log.sync()
            self.state.logged = self.progress.log.records
            snapshot = take_snapshot(self.run, self.engine, self.state)
            if self.exchange.leads:
                self._write_checkpoint(snapshot, prune=well)
            self.saved = self.run.folder / checkpoint_name(self.state.step)
            self.saved_at = self.state.step
        self.work, self.since = 0.0, time.perf_counter()

    def _write_checkpoint(self, snapshot: Snapshot, prune: bool) -> None:
        try:
            save_checkpoint(self.run.folder, snapshot, self.run.checkpoint.name)
        except CheckFailed as error:
            raise CheckFailed(f"{error}. {self._fallback()}") from None
        if prune:
            prune_checkpoints(self.run.folder, self.config.save_total_limit, self._best())

    def _best(self) -> Path | None:
        best = self.state.best
        return self.run.folder / checkpoint_name(best["step"]) if best else None

    def _fallback(self) -> str:
        """Names the last good checkpoint, for the last message of a failed run."""
        saved = self.saved or newest_checkpoint(self.run.folder)
        if saved is None:
            return "No checkpoint was saved yet."
        return f"The last good checkpoint is {saved}; --resume continues from it."

    def _notice(self, signal_name: str) -> None:
        def alone() -> str:
            return f"{signal_name}: the ranks did not agree to stop in time, so nothing was saved. {self._fallback()}"

        self.exchange.signalled(alone, exit_code(signal.Signals[signal_name]))
        if self.exchange.leads:
            text = f"{signal_name}: finishing this step and saving; send it again to exit at once"
            print(text, file=sys.stderr, flush=True)

    def _interrupted(self, signum: int) -> int:
        done = f"stopped after step {self.state.step}, saved {self.saved}; --resume continues"
        self.progress.message(done if self.state.step else "stopped before step 1; --resume starts again")
        return exit_code(signum)
