"""The page: one self-contained HTML file. The template escapes all text; the charts are our own SVG."""

from datetime import timedelta
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from lorawgpu import __version__
from lorawgpu.files.atomic import replace_file
from lorawgpu.files.run_folder import REPORT_FILE
from lorawgpu.report.charts import GIB, MIB, adapter_chart, charts_of
from lorawgpu.report.record import RunRecord, read_run

MAX_SECONDS = 1e10  # three centuries: what timedelta can hold
TEMPLATE = Path(__file__).parent / "page.html.j2"


@cache
def _template() -> jinja2.Template:
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters["svg"] = Markup
    return env.from_string(TEMPLATE.read_text("utf-8"))


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder; returns its path.

    Raises UserError if the folder holds no run or matplotlib is not installed, and OSError if the disk fails.
    """
    path = folder / REPORT_FILE
    html = page(read_run(folder))
    replace_file(path, html.encode("utf-8", "replace"))  # samples may hold half surrogates
    return path


def page(run: RunRecord) -> str:
    """The report of a run as HTML. Raises UserError if matplotlib is not installed."""
    adapter = run.adapter
    return _template().render(
        version=__version__,
        run=run,
        status=status(run),
        facts=facts(run),
        charts=charts_of(run),
        adapter_chart=adapter_chart(adapter) if adapter else None,
        largest=max((v for layer in adapter.change.values() for v in layer.values()), default=0.0) if adapter else 0.0,
    )


def status(run: RunRecord) -> str:
    total = run.first("total_steps")
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
    latest("Tokens", "tokens", lambda v: f"{v:,.0f}")
    latest("Training time", "seconds", lambda v: str(timedelta(seconds=round(min(v, MAX_SECONDS)))))
    latest("Tokens/s", "tokens_per_s", lambda v: f"{v:,.0f}")
    latest("GPU memory", "gpu_bytes", lambda v: f"{v / GIB:.2f} GiB" if v >= GIB / 10 else f"{v / MIB:.1f} MiB")
    if run.adapter:
        rows.append(("Adapter file", f"{run.adapter.nbytes / MIB:.1f} MiB"))
    return rows
