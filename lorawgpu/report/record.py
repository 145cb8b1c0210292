"""Reads a run folder; the run may be finished, running, killed or resumed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import METRICS_FILE, RUN_CONFIG_FILE, WEIGHTS_FILE
from lorawgpu.report.adapter import Adapter, read_change
from lorawgpu.train.checkpoint import list_checkpoints
from lorawgpu.train.metrics import read_metrics


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
        """(step, value) of every record with a number under `key`; a null (not finite) becomes NaN."""
        values = [(r["step"], r[key]) for r in self.records if key in r]
        return [(step, math.nan if v is None else float(v)) for step, v in values if v is None or _is_number(v)]

    def first(self, key: str) -> Any:
        """The first value of `key` in the records, or None."""
        return next((r[key] for r in self.records if key in r), None)

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
    if not records and not config_file.exists():
        raise UserError(f"{folder}: holds no run: wanted {METRICS_FILE} or {RUN_CONFIG_FILE} in it")
    config_text = config_file.read_text("utf-8", "replace") if config_file.exists() else ""
    adapter, note = _newest_adapter(folder, _continued_from(config_text))
    finished = adapter is not None and adapter.place == folder
    return RunRecord(folder, records, config_text, adapter, note, finished)


def _newest_adapter(folder: Path, start: Path | None) -> tuple[Adapter | None, str]:
    """The latest readable adapter, or None and why. The final one is written after all checkpoints.

    Changes nothing on disk: the run may still be going, and may remove a checkpoint at any moment.
    """
    places, note = [folder, *reversed(list_checkpoints(folder))], "No adapter has been saved yet."
    if len(places) > 1 and _written(places[1]) > _written(folder):
        places = places[1:]  # the run was resumed
    for place in places:
        if _written(place):
            try:
                return read_change(place, start), ""
            except (UserError, OSError) as error:
                note = str(error)
    return None, note


def _written(place: Path) -> float:
    """When the adapter in a folder was written; 0 if there is none."""
    try:
        return (place / WEIGHTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _continued_from(config_text: str) -> Path | None:
    """The adapter that the run continued from, or None; also None for a damaged config, so the rest is still shown."""
    try:
        config = yaml.safe_load(config_text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an invalid date
        return None
    adapter = config.get("adapter") if isinstance(config, dict) else None
    return Path(adapter) if isinstance(adapter, str) else None


def _texts(samples: Any) -> list[tuple[str, str]]:
    """(prompt, text) of a record's samples."""
    entries = samples if isinstance(samples, list) else []
    return [(str(s.get("prompt")), str(s.get("text"))) for s in entries if isinstance(s, dict)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
