"""The page: one self-contained HTML file. The template escapes all text; the charts are our own SVG."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lorawgpu import __version__
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.names import stem_of
from lorawgpu.files.run_folder import REPORT_FILE
from lorawgpu.report.charts import GIB, MIB, Range, adapter_chart, charts_of, perplexities, shared_range
from lorawgpu.report.record import RunRecord, read_run

MAX_SECONDS = 1e10  # three centuries: what timedelta can hold
MAX_VALUE = 1000  # characters of a value of a config
TEMPLATE = Path(__file__).parent / "page.html.j2"


@cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["svg"] = Markup
    return env.from_string(TEMPLATE.read_text("utf-8"))


def write_report(folder: Path, other: Path | None = None) -> Path:
    """Write `report.html` into a run folder, or next to it a page that compares the run with `other`; returns its path.

    Raises UserError if a folder holds no run or matplotlib is not installed, and OSError if the disk fails.
    """
    runs = [read_run(place) for place in (folder, other) if place is not None]
    path = folder / (REPORT_FILE if other is None else f"report-{stem_of(str(other.absolute()))}.html")
    html = page(runs)
    replace_file(path, html.encode("utf-8", "replace"))  # samples may hold half surrogates
    return path


def page(runs: Sequence[RunRecord]) -> str:
    """The report of a run, or of two side by side, as HTML. Raises UserError if matplotlib is not installed."""
    shared = shared_range(runs) if len(runs) > 1 else None
    return _template().render(version=__version__, runs=[_column(run, i, shared) for i, run in enumerate(runs)],
                              different=differences([run.config_text for run in runs]))  # fmt: skip


def _column(run: RunRecord, number: int, shared: Range | None) -> dict[str, Any]:
    """What the page shows of a run."""
    adapter, prefix = run.adapter, f"{'ab'[number]}-" if shared else ""
    changes = [v for layer in adapter.change.values() for v in layer.values()] if adapter else []
    return {
        "run": run,
        "prefix": prefix,
        "status": status(run),
        "facts": facts(run),
        "charts": charts_of(run, prefix, shared),
        "adapter_chart": adapter_chart(adapter, prefix) if adapter else None,
        "largest": max(changes, default=0.0),
    }


def differences(configs: Sequence[str]) -> list[tuple[str, str, str]]:
    """(key, value, value) of each key in which two configs differ; empty for one config.

    They are compared as text, since a config may come from anywhere.
    """
    if len(configs) < 2:
        return []
    first, second = map(_values, configs)
    rows = [(key, first.get(key, ""), second.get(key, "")) for key in dict.fromkeys([*first, *second])]
    return [(key, one[:MAX_VALUE], two[:MAX_VALUE]) for key, one, two in rows if one != two]


def _values(config: str) -> dict[str, str]:
    """The text of each key: what follows it, and the lines below it that are indented or items of a list."""
    values: dict[str, str] = {}
    key = None
    for line in config.splitlines():
        if line[:1] in (" ", "-") and key is not None:
            values[key] += "\n" + line
        elif line and line[0] != "#":
            key, _, value = line.partition(":")
            values[key] = value.strip()
    return values


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(min(seconds, MAX_SECONDS))))


def status(run: RunRecord) -> str:
    total = run.last("total_steps")
    done = f"step {run.steps:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    return f"finished at {done}" if run.finished else f"{done}; running or interrupted: no final adapter yet"


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """(name, value) of the most important figures."""
    rows = []

    def first_to_last(name, values):
        known = [v for v in values if v == v]
        if known:
            change = f" → {known[-1]:.3f} ({known[-1] / known[0] - 1:+.0%})" if len(known) > 1 and known[0] else ""
            rows.append((name, f"{known[0]:.3f}{change}"))

    def latest(name, key, text):
        if series := [v for _, v in run.series(key) if v == v]:
            rows.append((name, text(series[-1])))

    first_to_last("Training loss", [v for _, v in run.series("loss")])
    first_to_last("Held-out loss", [v for _, v in run.series("base_eval_loss") + run.series("eval_loss")])
    held_out = perplexities(run.series("base_eval_loss")[:1] + run.series("eval_loss"))
    first_to_last("Perplexity (held out)", [v for _, v in held_out])
    tokens, seconds, paused = (run.total(key) for key in ("tokens", "seconds", "paused_seconds"))
    if tokens is not None:
        rows.append(("Tokens", f"{tokens:,.0f}"))
    if seconds is not None:
        rows.append(("Training time", _time(seconds)))
    if tokens is not None and seconds:
        rows.append(("Tokens/s", f"{tokens / seconds:,.0f}"))
    if run.started:
        rows.append(("Started", run.started))
    if seconds is not None and paused is not None:
        rows.append(("Wall time", _time(seconds + paused)))
    latest("GPU memory", "gpu_bytes", lambda v: f"{v / GIB:.2f} GiB" if v >= GIB / 10 else f"{v / MIB:.1f} MiB")
    if run.adapter:
        rows.append(("Adapter file", f"{run.adapter.nbytes / MIB:.1f} MiB"))
    return rows
