"""A run's reports: a JSON line per record in `metrics.jsonl`, a progress line on the terminal, and a summary."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.untrusted import read_bytes
from lorawgpu.train.loggers import Logger
from lorawgpu.util.duration import duration
from lorawgpu.util.progress import INTERVAL, bar

EVALUATING, SAVING = "evaluating", "saving"
SHOWN_FROM = 1.0  # seconds not spent training, in the summary

MAX_METRICS = 1 << 30  # bytes: a million steps, all logged, take a quarter of it
MAX_BAD_LINES = 1000
MAX_STEP = 10**12


class MetricsLog:
    """Appends records to a JSONL file, each one at once; `loggers` get their numbers too. An OSError names the file.

    With `resume_step`, records after that step (and an incomplete last line, if the run was killed while writing) are
    removed first; without it the file starts empty. Non-finite numbers are written as null, since JSON has no NaN.
    """

    def __init__(self, path: Path, resume_step: int | None = None, loggers: Sequence[Logger] = ()):
        self.loggers = loggers
        kept = [] if resume_step is None else [r for r in read_metrics(path) if r["step"] <= resume_step]
        replace_file(path, b"".join(_line(record) for record in kept))
        self.records = len(kept)  # in the file
        self._file = open(path, "ab", buffering=0)  # so that closing has nothing left to write to a full disk

    def write(self, step: int, **values: Any) -> None:
        left = memoryview(_line({"step": step} | values))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:  # it does not name the file
            raise type(error)(error.errno, error.strerror, self._file.name) from None
        self.records += 1
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for logger in self.loggers:
            logger.write(step, numbers)

    def sync(self) -> None:
        """Make what was written survive a power cut, as the checkpoint that follows does."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for logger in self.loggers:
            logger.close()


class NoLog(MetricsLog):
    """The log of a process that does not lead: it discards everything."""

    def __init__(self):
        self.records = 0

    def write(self, step: int, **values: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def now() -> str:
    """The local time, to the second, with its offset from UTC."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, also of a running or killed run; empty if there is no file.

    UserError if it is too large, or for the most part no file of records.
    """
    records, bad = [], 0
    for line in read_bytes(path, MAX_METRICS).splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # a line that was being written, or a line of another program
            record = None
        if isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] <= MAX_STEP:
            records.append(record)
        elif (bad := bad + 1) > MAX_BAD_LINES:
            raise UserError(f"{path}: more than {MAX_BAD_LINES:,} of its lines are no records of a run")
    return records


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """The progress line, and the records that it summarizes.

    On a terminal one line is rewritten; a file or a pipe gets one line per logged step. tokens/s counts training time
    only: time inside `paused()` (evaluating, saving) is left out. evaluations_left: of the run, for the time that is
    left.
    """

    def __init__(
        self,
        log: MetricsLog,
        total_steps: int,
        start_step: int = 0,
        stream=None,
        evaluations_left: Callable[[], int] = lambda: 0,
    ):
        self.log, self.total_steps, self.start_step = log, total_steps, start_step
        self.stream, self.evaluations_left = stream or sys.stderr, evaluations_left
        # The bar comes last: a narrow terminal cuts it off, rather than the loss.
        self.bar = bar(self.stream, total=total_steps, initial=start_step,
                       bar_format="step {n_fmt}/{total_fmt} {desc} {bar:12}")  # fmt: skip
        self.steps = self.tokens = 0  # since start_step
        self.seconds = 0.0  # of training, since start_step
        self.pauses: dict[str, float] = {}  # seconds not spent training, by what was done
        self.waited = 0.0  # seconds of training time that were spent waiting for data
        self.losses: list[float] = []  # finite ones that were logged
        self._evaluation = 0.0  # seconds of the latest evaluation
        self._started = self._since = time.perf_counter()  # _since: when time was last added to `seconds`
        self._logged = (0, 0.0)  # tokens and seconds at the last logged step
        self._shown = ""
        self._did = 0.0  # when `doing` last printed a line

    def advance(self, tokens: int) -> None:
        """Count an optimizer step on `tokens` tokens that was submitted."""
        self.steps += 1
        self.tokens += tokens
        self.bar.set_description_str(self._line(self.start_step + self.steps), refresh=False)
        self.bar.update()

    def left(self, step: int) -> float:
        """Seconds until the end, after step `step`: its steps and its evaluations, at the pace so far."""
        steps = (self._training_time() / max(1, step - self.start_step)) * (self.total_steps - step)
        return steps + self._evaluation * self.evaluations_left()

    def _line(self, step: int) -> str:
        passed = tqdm.format_interval(time.perf_counter() - self._started)
        return f"{self._shown} {passed}<{tqdm.format_interval(self.left(step))}".lstrip()

    def logged(self, step: int, loss: float, lr: float, grad_norm: float, **more: Any) -> None:
        """Write and show the record of step `step` (from 1), which was read back.

        Call it after the readback has waited for the GPU, so that tokens/s counts finished work, not queued work.
        """
        self._count_time()
        tokens, seconds = self.tokens - self._logged[0], self.seconds - self._logged[1]
        self._logged = (self.tokens, self.seconds)
        rate = tokens / seconds if seconds else 0.0
        if math.isfinite(loss):
            self.losses.append(loss)
        self.log.write(step, loss=loss, learning_rate=lr, grad_norm=grad_norm, tokens_per_s=round(rate, 1),
                       tokens=self.tokens, seconds=round(self.seconds, 3), paused_seconds=round(self.paused_seconds, 3),
                       data_wait_seconds=round(self.waited, 3), **more)  # fmt: skip
        self._shown = f"loss {loss:.4f} lr {lr:.2e} grad {grad_norm:.3g} {rate:,.0f} tok/s"
        if self.bar.disable:
            line = f"step {step}/{self.total_steps} {self._shown} ETA {tqdm.format_interval(self.left(step))}"
            print(line, file=self.stream, flush=True)
        else:
            self.bar.set_description_str(self._line(step))

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        self.bar.clear()
        print(text, file=self.stream, flush=True)
        self.bar.refresh()

    def doing(self, text: str) -> None:
        """Show what is done instead of training: in the progress line, else in a line every few seconds."""
        now = time.perf_counter()
        if not self.bar.disable:
            self.bar.set_description_str(text, refresh=now - self._did > self.bar.mininterval)
        elif now - self._did >= INTERVAL:
            print(text, file=self.stream, flush=True)
        else:
            return
        self._did = now

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Time spent inside does not count as training time, but as `what` (EVALUATING or SAVING)."""
        self._count_time()
        self._did = self._since
        try:
            yield
        finally:
            since, self._since = self._since, time.perf_counter()
            took = self._since - since
            self.pauses[what] = self.pauses.get(what, 0.0) + took
            if what == EVALUATING:
                self._evaluation = took
            if not self.bar.disable:  # no longer what `doing` said
                self.bar.set_description_str(self._line(self.start_step + self.steps), refresh=False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside is spent waiting for data."""
        since = time.perf_counter()
        yield
        self.waited += time.perf_counter() - since

    @property
    def paused_seconds(self) -> float:
        return sum(self.pauses.values())

    def _training_time(self) -> float:
        return self.seconds + time.perf_counter() - self._since

    def _count_time(self) -> None:
        self.seconds, self._since = self._training_time(), time.perf_counter()

    def close(self) -> None:
        self.bar.close()
        self.log.close()

    def summary(self) -> str:
        """One line about the whole run, as of its last logged step."""
        loss = f", loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}" if self.losses else ""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        text = (f"{self.steps} steps, {self.tokens:,} tokens in {tqdm.format_interval(self.seconds)} "
                f"({rate:,.0f} tok/s){loss}")  # fmt: skip
        others = [(what, seconds) for what, seconds in self.pauses.items() if seconds >= SHOWN_FROM]
        others += [("of training waiting for data", self.waited)] if self.waited >= SHOWN_FROM else []
        return text + "".join(f"; {duration(seconds)} {what}" for what, seconds in others)
