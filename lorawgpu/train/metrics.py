"""A run's reports: a JSON line per record in `metrics.jsonl`, a progress line on the terminal, and a summary."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lorawgpu.errors import UserError
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.untrusted import read_bytes
from lorawgpu.train.loggers import Logger

MAX_METRICS = 1 << 30  # bytes: a million steps, all logged, take a quarter of it
MAX_BAD_LINES = 1000
MAX_STEP = 10**12


class MetricsLog:
    """Appends records to a JSONL file and flushes each one; `loggers` get their numbers too.

    With `resume_step`, records after that step (and an incomplete last line, if the run was killed while writing) are
    removed first; without it the file starts empty. Non-finite numbers are written as null, since JSON has no NaN.
    """

    def __init__(self, path: Path, resume_step: int | None = None, loggers: Sequence[Logger] = ()):
        self.loggers = loggers
        kept = [] if resume_step is None else [r for r in read_metrics(path) if r["step"] <= resume_step]
        replace_file(path, b"".join(_line(record) for record in kept))
        self.records = len(kept)  # in the file
        self._file = open(path, "ab")

    def write(self, step: int, **values: Any) -> None:
        self._file.write(_line({"step": step} | values))
        self._file.flush()
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
    only: time inside `paused()` (evaluating, saving) is left out.
    """

    def __init__(self, log: MetricsLog, total_steps: int, start_step: int = 0, stream=None):
        self.log, self.total_steps, self.start_step = log, total_steps, start_step
        self.stream = stream or sys.stderr
        self.bar = tqdm(
            total=total_steps, initial=start_step, file=self.stream, disable=not self.stream.isatty(), unit="step",
            dynamic_ncols=True, bar_format="step {n_fmt}/{total_fmt} {bar:12} {postfix} {elapsed}<{remaining}",
        )  # fmt: skip
        self.steps = self.tokens = 0  # since start_step
        self.seconds = 0.0  # of training, since start_step
        self.first_loss = self.last_loss = None
        self._since = time.perf_counter()  # when time was last added to `seconds`
        self._logged = (0, 0.0)  # tokens and seconds at the last logged step

    def advance(self, tokens: int) -> None:
        """Count an optimizer step on `tokens` tokens that was submitted."""
        self.steps += 1
        self.tokens += tokens
        self.bar.update()

    def logged(self, step: int, loss: float, lr: float, grad_norm: float, **more: Any) -> None:
        """Write and show the record of step `step` (from 1), which was read back.

        Call it after the readback has waited for the GPU, so that tokens/s counts finished work, not queued work.
        """
        self._count_time()
        tokens, seconds = self.tokens - self._logged[0], self.seconds - self._logged[1]
        self._logged = (self.tokens, self.seconds)
        rate = tokens / seconds if seconds else 0.0
        if math.isfinite(loss):
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.last_loss = loss
        self.log.write(step, loss=loss, learning_rate=lr, grad_norm=grad_norm, tokens_per_s=round(rate, 1),
                       tokens=self.tokens, seconds=round(self.seconds, 3), **more)  # fmt: skip
        shown = f"loss {loss:.4f} lr {lr:.2e} grad {grad_norm:.3g} {rate:,.0f} tok/s"
        if self.bar.disable:
            left = self.seconds / max(1, step - self.start_step) * (self.total_steps - step)
            line = f"step {step}/{self.total_steps} {shown} ETA {tqdm.format_interval(left)}"
            print(line, file=self.stream, flush=True)
        else:
            self.bar.set_postfix_str(shown)

    def message(self, text: str) -> None:
        """Print a line above the progress line."""
        self.bar.clear()
        print(text, file=self.stream, flush=True)
        self.bar.refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count as training time."""
        self._count_time()
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    def close(self) -> None:
        self.bar.close()
        self.log.close()

    def summary(self) -> str:
        """One line about the whole run, as of its last logged step."""
        loss = "" if self.first_loss is None else f", loss {self.first_loss:.4f} -> {self.last_loss:.4f}"
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (f"{self.steps} steps, {self.tokens:,} tokens in {tqdm.format_interval(self.seconds)} "
                f"({rate:,.0f} tok/s){loss}")  # fmt: skip
