"""The charts of a report, drawn by matplotlib as inline SVG."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorawgpu.errors import UserError
from lorawgpu.report.adapter import Adapter
from lorawgpu.report.hover import Lines, strips
from lorawgpu.report.record import RunRecord

MIB, GIB = 2**20, 2**30
BLUE, ORANGE, GRAY, RED = "#2563a8", "#d9762b", "#9aa4b1", "#c22f2f"
TITLE = "Change of the adapter, by layer"
MAX_EXPONENT = 200.0  # of a perplexity that a chart can show
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
Line = tuple[str, str, Series]  # label, color, values


@dataclass(frozen=True)
class Chart:
    """`svg` is None if there is nothing to draw yet; `summary`: the content in words, for screen readers."""

    id: str
    title: str
    summary: str
    svg: str | None


@dataclass(frozen=True)
class Range:
    """The axes that the charts of two runs share: their steps, and all values of a chart by its id."""

    steps: int
    values: dict[str, list[float]]


def shared_range(runs: Sequence[RunRecord]) -> Range:
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, _, lines, options in _charts(run):
            series = [*(series for _, _, series in lines), options.get("level", [])]
            values.setdefault(name, []).extend(v for one in series for _, v in one if math.isfinite(v))
    return Range(max(run.steps for run in runs), values)


def charts_of(run: RunRecord, prefix: str = "", shared: Range | None = None) -> list[Chart]:
    """All charts of a run. `prefix`: of their ids; `shared`: the axes of a comparison.

    Raises UserError if matplotlib is not installed.
    """
    return [line_chart(name, title, lines, prefix, shared, **options) for name, title, lines, options in _charts(run)]


def _charts(run: RunRecord) -> list[tuple[str, str, list[Line], dict]]:
    """(id, title, lines, options of `line_chart`) of each chart."""
    held_out, base = run.series("eval_loss"), run.series("base_eval_loss")
    memory = run.series("gpu_bytes")
    unit, size = ("GiB", GIB) if any(value >= GIB for _, value in memory) else ("MiB", MIB)
    memory = [(step, value / size) for step, value in memory]
    losses = [("training", BLUE, run.series("loss")), ("held out", ORANGE, base[:1] + held_out)]
    bad = [step for step, _ in run.bad_steps]
    return [
        ("loss", "Loss", losses, {"marks": bad, "level": base[:1]}),
        ("perplexity", "Perplexity of held-out data", [("", ORANGE, perplexities(base[:1] + held_out))], {"log": True}),
        ("learning-rate", "Learning rate", [("", BLUE, run.series("learning_rate"))], {"zero": True}),
        ("grad-norm", "Gradient norm, before clipping", [("", BLUE, run.series("grad_norm"))], {"log": True}),
        ("speed", "Tokens per second", [("", BLUE, run.series("tokens_per_s"))], {"zero": True}),
        ("memory", f"GPU memory, {unit}", [("", BLUE, memory)], {"zero": True}),
    ]


def perplexities(losses: Series) -> Series:
    """exp of each loss; what no chart can show is NaN."""
    return [(step, math.exp(loss) if loss < MAX_EXPONENT else math.nan) for step, loss in losses]


def line_chart(
    name: str,
    title: str,
    lines: list[Line],
    prefix: str = "",
    shared: Range | None = None,
    marks: list[int] = (),
    level: Series = (),
    zero: bool = False,
    log: bool = False,
) -> Chart:
    """Values over steps. `marks`: bad steps; `level`: the value before training, drawn as a horizontal line.

    `log`: use a log scale if all values are positive and span more than two decades. `zero`: begin at 0.
    """
    lines = [line for line in lines if any(math.isfinite(v) for _, v in line[2])]
    values = [v for _, _, series in lines for _, v in series if math.isfinite(v)]
    if not values:
        return Chart(prefix + name, title, "nothing logged yet", None)
    span = shared.values[name] if shared else values

    def draw(axes):
        for label, color, series in lines:
            steps, numbers = zip(*series, strict=True)
            marker = "o" if len(series) < MARKERS_BELOW else ""
            axes.plot(steps, numbers, color=color, linewidth=1.5, marker=marker, markersize=3, label=label)
        for _, value in level:
            axes.axhline(value, color=GRAY, linewidth=1, linestyle="--", label="before training")
        for number, step in enumerate(marks[:MAX_MARKS]):
            axes.axvline(step, color=RED, linewidth=0.8, label="skipped: not finite" if not number else "")
        if marks or level or len(lines) > 1:
            axes.legend()
        if log and min(span) > 0 and max(span) > 100 * min(span):
            axes.set_yscale("log")
        elif zero:
            axes.set_ylim(0, 1.1 * max(span) or 1)
        elif shared and max(span) > min(span):
            margin = 0.05 * (max(span) - min(span))
            axes.set_ylim(min(span) - margin, max(span) + margin)
        if shared and shared.steps:
            axes.set_xlim(-0.02 * shared.steps, 1.02 * shared.steps)
        axes.set_xlabel("step")

    hovered = [(label, series) for label, _, series in lines]
    summary = "; ".join(
        f"{label + ' ' if label else ''}from {finite[0]:.4g} to {finite[-1]:.4g}"
        for label, finite in ((label, [v for _, v in series if math.isfinite(v)]) for label, _, series in lines)
    )
    return Chart(prefix + name, title, summary, _svg(prefix + name, draw, hovered))


def adapter_chart(adapter: Adapter, prefix: str = "") -> Chart:
    """The change of each layer. `prefix`: of its id."""
    layers = list(adapter.change)
    changes = [adapter.layer_change(layer) for layer in layers]

    def draw(axes):
        axes.bar(layers, changes, color=BLUE)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x", visible=False)

    summary = f"between {min(changes, default=0):.4g} and {max(changes, default=0):.4g}"
    return Chart(f"{prefix}adapter", TITLE, summary, _svg(f"{prefix}adapter", draw) if layers else None)


def _svg(name: str, draw: Callable, hovered: Lines = ()) -> str:
    """An <svg> element. `name` makes its ids distinct from those of other charts, and reproducible.

    `hovered`: lines whose values are shown on hover.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"the report's charts need matplotlib ({error}): pip install matplotlib") from None
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.draw_without_rendering()  # settles the layout, at the figure's own resolution again
        over = strips(axes, hovered) if hovered else ""
    text = out.getvalue()
    text = text[text.index("<svg") :]
    end = text.rindex("</svg>")
    return text[:end] + over + text[end:]
