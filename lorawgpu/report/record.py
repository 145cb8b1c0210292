"""Reads a run folder; the run may be finished, running, killed or resumed."""

import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lorawgpu.config.schema import METHODS
from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import CHECKPOINT_PATTERN, METRICS_FILE, RUN_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.files.untrusted import read_text_if_regular
from lorawgpu.report.adapter import Adapter, read_change
from lorawgpu.train.checkpoint import list_checkpoints
from lorawgpu.train.metrics import read_metrics

MAX_CONFIG = 64 << 10  # bytes that are shown and parsed; a config has a few thousand
MAX_SHOWN = 1e100
MAX_TEXT = 20_000  # characters of a sample


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder. `adapter`: None before the first checkpoint; `finished`: it is the final one."""

    folder: Path
    records: list[dict[str, Any]]
    config_text: str
    adapter: Adapter | None
    adapter_note: str
    finished: bool

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every record with a number under `key`; a null, or what no chart can show, becomes NaN."""
        values = [(r["step"], r[key]) for r in self.records if key in r]
        return [(step, _shown(v)) for step, v in values if v is None or _is_number(v)]

    def first(self, key: str) -> Any:
        """The first value of `key` in the records, or None."""
        return next((r[key] for r in self.records if key in r), None)

    def last(self, key: str) -> Any:
        """The last value of `key` in the records, or None."""
        return next((r[key] for r in reversed(self.records) if key in r), None)

    def total(self, key: str) -> float | None:
        """The sum of a counter over the processes that trained, each of which began at 0; None if there is none."""
        ends: list[float] = []
        last = None
        for record in self.records:
            value = _shown(record[key]) if _is_number(record.get(key)) else None
            if "started" in record or (value is not None and last is not None and value < last):
                ends, last = ends + ([last] if last is not None else []), None
            last = last if value is None or value != value else value
        ends += [last] if last is not None else []
        return sum(ends) if ends else None

    @property
    def started(self) -> str | None:
        """When the run began, as it is shown; None if its records do not say."""
        text = self.first("started")
        try:
            return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M") if isinstance(text, str) else None
        except ValueError:
            return None

    @property
    def steps(self) -> int:
        """Optimizer steps logged so far."""
        return max((r["step"] for r in self.records), default=0)

    @property
    def plan(self) -> dict[str, str]:
        plan = self.first("plan")
        return plan if isinstance(plan, dict) else {}

    @property
    def bad_steps(self) -> list[tuple[int, str]]:
        """Steps that were not finite, with the name of the first bad tensor."""
        return [(r["step"], str(r["bad_step"])) for r in self.records if "bad_step" in r]

    def samples(self) -> list[tuple[str, str | None, list[tuple[int, str]]]]:
        """For each prompt: (prompt, the base model's answer, [(step, answer)])."""
        base, answers = dict(_texts(self.first("base_samples"))), {}
        for record in self.records:
            for prompt, text in _texts(record.get("samples")):
                answers.setdefault(prompt, []).append((record["step"], text))
        return [(prompt, base.get(prompt), answers.get(prompt, [])) for prompt in dict.fromkeys([*base, *answers])]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder. Raises UserError if it holds no run."""
    records = read_metrics(folder / METRICS_FILE)
    config_file = folder / RUN_CONFIG_FILE
    if not records and not config_file.is_file():
        raise UserError(f"{folder}: holds no run: wanted {METRICS_FILE} or {RUN_CONFIG_FILE} in it")
    config_text = read_text_if_regular(config_file, MAX_CONFIG)
    adapter, note = _newest_adapter(folder, _continued_from(config_text), records)
    finished = adapter is not None and adapter.place == folder
    return RunRecord(folder, records, config_text, adapter, note, finished)


def _newest_adapter(folder: Path, start: Path | None, records: list[dict]) -> tuple[Adapter | None, str]:
    """The latest readable adapter, or None and why. The final one is written after all checkpoints.

    Changes nothing on disk: the run may still be going, and may remove a checkpoint at any moment.
    """
    places, note = [folder, *reversed(list_checkpoints(folder))], "No adapter has been saved yet."
    if len(places) > 1 and not _ended(records, folder, places[1]):
        places = places[1:]  # the run was resumed
    for place in places:
        if _written(place):
            try:
                return read_change(place, start), ""
            except (UserError, OSError) as error:
                note = str(error)
    return None, note


def _ended(records: list[dict], folder: Path, checkpoint: Path) -> bool:
    """Whether the run's last word is its end, and no checkpoint is later. Times tell where no record does: those of a
    copy have no order."""
    if not any("finished" in record for record in records):
        return _written(folder) >= _written(checkpoint)
    return "finished" in records[-1] and records[-1]["step"] >= int(re.search(CHECKPOINT_PATTERN, checkpoint.name)[1])


def _written(place: Path) -> float:
    """When the adapter in a folder was written; 0 if there is none."""
    try:
        return (place / WEIGHTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _continued_from(config_text: str) -> Path | None:
    """The adapter that the run continued from, or None; also None for a damaged config, so the rest is still shown."""
    try:
        config = yaml.load(config_text, yaml.BaseLoader)  # knows texts only, so no tag can fail
    except (yaml.YAMLError, RecursionError):
        return None
    for key in ("lora_model_dir", "adapter") if isinstance(config, dict) else ():
        folder = config.get(key)
        if isinstance(folder, str) and folder not in ("", "null", *METHODS):
            return Path(folder)
    return None


def _texts(samples: Any) -> list[tuple[str, str]]:
    """(prompt, text) of a record's samples."""
    entries = samples if isinstance(samples, list) else []
    return [(str(s.get("prompt"))[:MAX_TEXT], str(s.get("text"))[:MAX_TEXT]) for s in entries if isinstance(s, dict)]


def _shown(value: float | None) -> float:
    """A number that a chart can show; NaN for others."""
    return float(value) if value is not None and abs(value) <= MAX_SHOWN else math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
