"""The charts of a report, drawn by matplotlib as inline SVG."""

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.report.adapter import Adapter
from lorawgpu.report.record import RunRecord

MIB, GIB = 2**20, 2**30
BLUE, ORANGE, GRAY, RED = "#2563a8", "#d9762b", "#9aa4b1", "#c22f2f"
MAX_MARKS = 500  # bad steps that are drawn
MARKERS_BELOW = 40  # points; shorter series get a marker at each
STYLE = {
    "axes.edgecolor": GRAY,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelcolor": "#444444",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, sharp, selectable
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}

Series = list[tuple[int, float]]


@dataclass(frozen=True)
class Chart:
    """`svg` is None if there is nothing to draw yet; `summary`: the content in words, for screen readers."""

    id: str
    title: str
    summary: str
    svg: str | None


def charts_of(run: RunRecord) -> list[Chart]:
    """All charts of a run. Raises UserError if matplotlib is not installed."""
    held_out, base = run.series("eval_loss"), run.series("base_eval_loss")
    bad = [step for step, _ in run.bad_steps]
    memory = run.series("gpu_bytes")
    unit, size = ("GiB", GIB) if any(value >= GIB for _, value in memory) else ("MiB", MIB)
    memory = [(step, value / size) for step, value in memory]
    norms = [("", BLUE, run.series("grad_norm"))]
    return [
        line_chart("loss", "Training loss", [("training", BLUE, run.series("loss"))], marks=bad),
        line_chart("eval-loss", "Held-out loss", [("held out", ORANGE, base + held_out)], level=base),
        line_chart("learning-rate", "Learning rate", [("", BLUE, run.series("learning_rate"))], zero=True),
        line_chart("grad-norm", "Gradient norm, before clipping", norms, logarithmic=True),
        line_chart("speed", "Tokens per second", [("", BLUE, run.series("tokens_per_s"))], zero=True),
        line_chart("memory", f"GPU memory, {unit}", [("", BLUE, memory)], zero=True),
    ]


def line_chart(
    name: str,
    title: str,
    lines: list[tuple[str, str, Series]],
    marks: list[int] = (),
    level: Series = (),
    zero: bool = False,
    logarithmic: bool = False,
) -> Chart:
    """Values over steps. `marks`: bad steps; `level`: the base model's value, drawn as a horizontal line.

    `logarithmic`: use a log scale if all values are positive and span more than two decades.
    """
    values = [v for _, _, series in lines for _, v in series if math.isfinite(v)]
    if not values:
        return Chart(name, title, "nothing logged yet", None)

    def draw(axes):
        for label, color, series in lines:
            steps, numbers = zip(*series, strict=True)
            marker = "o" if len(series) < MARKERS_BELOW else ""
            axes.plot(steps, numbers, color=color, linewidth=1.5, marker=marker, markersize=3, label=label)
        for _, value in level:
            axes.axhline(value, color=GRAY, linewidth=1, linestyle="--", label="base model")
        for number, step in enumerate(marks[:MAX_MARKS]):
            axes.axvline(step, color=RED, linewidth=0.8, label="skipped: not finite" if not number else "")
        if marks or level:
            axes.legend()
        if logarithmic and min(values) > 0 and max(values) > 100 * min(values):
            axes.set_yscale("log")
        elif zero:
            axes.set_ylim(0, 1.1 * max(values) or 1)
        axes.set_xlabel("step")

    return Chart(name, title, f"from {values[0]:.4g} to {values[-1]:.4g}", _svg(name, draw))


def adapter_chart(adapter: Adapter) -> Chart:
    """The change of each layer."""
    layers = list(adapter.change)
    changes = [adapter.layer_change(layer) for layer in layers]

    def draw(axes):
        axes.bar(layers, changes, color=BLUE)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x", visible=False)

    summary = f"between {min(changes, default=0):.4g} and {max(changes, default=0):.4g}"
    return Chart("adapter", "Change of the adapter, by layer", summary, _svg("adapter", draw) if layers else None)


def _svg(name: str, draw: Callable) -> str:
    """An <svg> element. `name` makes its ids distinct from those of other charts, and reproducible."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"the report's charts need matplotlib ({error}): pip install matplotlib") from None
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
