"""Values on hover in an SVG chart: an invisible strip for each step, whose <title> browsers show as a tooltip.

No script is needed, so the page stays one file that any viewer can show.
"""

import math
from html import escape

MAX_STRIPS = 300  # more steps share strips: their titles would be most of the page
POINTS = 72  # per inch: matplotlib's SVG units

Lines = list[tuple[str, list[tuple[int, float]]]]  # label and series


def titles(lines: Lines) -> dict[int, str]:
    """By step, what a tooltip says: the step, and each line's value there."""
    values: dict[int, list[str]] = {}
    for label, series in lines:
        for step, value in series:
            text = f"{value:,.5g}" if math.isfinite(value) else "not finite"
            values.setdefault(step, []).append(f"{label}: {text}" if label else text)
    steps = sorted(values)
    steps = steps[:: max(1, -(-len(steps) // MAX_STRIPS))]
    return {step: "\n".join([f"step {step:,}", *values[step]]) for step in steps}


def strips(axes, lines: Lines) -> str:
    """SVG of the strips, in the coordinates of the figure that `axes` were drawn in."""
    scale, height = POINTS / axes.figure.dpi, axes.figure.get_figheight() * POINTS
    box = axes.get_window_extent()
    left, right, top = box.x0 * scale, box.x1 * scale, height - box.y1 * scale
    found = titles(lines)
    at = [float(axes.transData.transform((step, 1.0))[0]) * scale for step in found]
    edges = [left, *((a + b) / 2 for a, b in zip(at, at[1:], strict=False)), right]
    out = []
    for x, start, end, title in zip(at, edges, edges[1:], found.values(), strict=False):
        out.append(
            f'<g class="hover"><rect x="{start:.1f}" y="{top:.1f}" width="{max(0.0, end - start):.1f}" '
            f'height="{box.height * scale:.1f}"><title>{escape(title)}</title></rect>'
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + box.height * scale:.1f}"/></g>'
        )
    return "".join(out)
