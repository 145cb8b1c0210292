"""Training from Python: what `lorawgpu.train` does when it is called, and the command too."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorawgpu.data.workers import start_worker
from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import METRICS_FILE
from lorawgpu.files.untrusted import brief
from lorawgpu.report.page import write_report
from lorawgpu.train.fit import CardMemory
from lorawgpu.train.interrupt import Interrupted
from lorawgpu.train.job import Job, read_job_config, ready_trainer
from lorawgpu.train.metrics import read_metrics
from lorawgpu.train.ranks import companions, together
from lorawgpu.train.run_dir import claim
from lorawgpu.util.streams import lasting_stdout


@dataclass(frozen=True)
class Trained:
    """What a run left behind. `adapter`: a folder for `load` and `generate --adapter`; `metrics`: the records of its
    metrics.jsonl, oldest first; `leads`: whether this process wrote them, of those that trained together."""

    folder: Path
    adapter: Path
    metrics: list[dict[str, Any]]
    leads: bool = True


def train(
    config: str | Path | Mapping,
    *,
    on_step: Callable[[Mapping[str, Any]], str | None] | None = None,
    resume: str | Path | bool | None = None,
    overrides: Sequence[str] = (),
    device: str | int | None = None,
    memory: str | CardMemory | None = None,
    skip_bad_lines: bool = False,
) -> Trained:
    """Train an adapter as a config says, exactly as `lorawgpu train` does.

    config: a YAML file, or a dict of its keys. In a dict, `datasets` may be a list of records, and so may the `path` of
    a data set. on_step: called after each step with its metrics (step, total_steps, epoch, loss, lr, grad_norm,
    bad_steps; eval_loss after an evaluation); may return "save", or "stop" to end the run here, with its adapter. Steps
    then wait for the GPU one by one. resume: True for the newest checkpoint in output_dir, or the folder of one.
    overrides, device, memory, skip_bad_lines: the options of the command.

    Raises UserError for wrong input, CheckFailed after too many bad steps or if the adapter fails its final check,
    DeviceError, and what `on_step` raised, after saving a checkpoint. After Ctrl-C or SIGTERM the step is finished, a
    checkpoint is saved, and Interrupted, a KeyboardInterrupt, is raised.
    """
    start_worker()
    job = Job(
        _source(config),
        tuple(overrides),
        "auto" if resume is True else str(resume) if resume else None,
        None if device is None else str(device),
        CardMemory.read(memory) if isinstance(memory, str) else memory,
        skip_bad_lines,
        on_step=_checked(on_step),
    )
    with companions() as exchange:
        settings, notes = read_job_config(job, exchange)
        folder = Path(settings.output_dir)
        with ExitStack() as stack:
            claimed = claim(folder)
            together(exchange, lambda: stack.enter_context(claimed), exchange.leads)
            stack.enter_context(lasting_stdout())
            code = ready_trainer(settings, job, exchange, notes).train()
            if exchange.leads:
                write_report_if_possible(folder)
    if code:
        raise Interrupted(code)
    return Trained(folder, folder, read_metrics(folder / METRICS_FILE), exchange.leads)


def _source(config: object) -> str | Path | Mapping:
    if isinstance(config, str | Path | Mapping):
        return config
    raise UserError(f"config is {brief(config)}; wanted the path of a YAML file, or a dict of its keys")


def _checked(on_step: object):
    if on_step is None or callable(on_step):
        return on_step
    raise UserError(f"on_step is {brief(on_step)}; wanted a function of the metrics of a step")


def write_report_if_possible(folder: Path) -> None:
    """The run is finished and saved, so a report that cannot be written is only a note."""
    try:
        print(f"report: {write_report(folder)}")
    except (UserError, OSError) as error:
        print(f"note: no report: {error}", file=sys.stderr)
