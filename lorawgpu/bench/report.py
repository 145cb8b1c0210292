"""One line of JSON that says what was measured, and two of them side by side."""

import json
from pathlib import Path

from lorawgpu.errors import UserError, explain

KEY, FORMAT = "lorawgpu_bench", 1  # what marks a line, and the version of its fields
SAME = ("shape", "tokens", "seq", "rank", "store", "checkpointing")  # of trainings that can be compared


def line_of(report: dict) -> str:
    return json.dumps({KEY: FORMAT, **report}, separators=(",", ":"))


def read_report(path: Path) -> dict:
    """The last report among the lines of a file: what `lorawgpu bench` printed, with or without the rest of it.

    UserError if the file cannot be read or holds none.
    """
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise UserError(explain(error, path)) from None
    found = [report for line in lines if line.startswith("{") and (report := _parsed(line))]
    if not found:
        raise UserError(f'{path}: no line of `lorawgpu bench`; wanted one that begins with {{"{KEY}":{FORMAT}')
    return found[-1]


def _parsed(line: str) -> dict | None:
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kinds = {"adapter": str, "trainings": list, "products": list}
    whole = isinstance(report, dict) and report.get(KEY) == FORMAT
    return report if whole and all(isinstance(report.get(k), kind) for k, kind in kinds.items()) else None


def compared(ours: dict, theirs: dict) -> list[str]:
    """Lines that set what both have measured side by side. A training differs if it does by more than both spreads."""
    lines = [f"compared with {theirs['adapter']}, driver {theirs.get('driver', '-')}"]
    numbers = (int, float)
    if isinstance(theirs.get("copy_gb_s"), numbers) and theirs["copy_gb_s"]:
        lines.append(_line("copy", "GB/s", ours["copy_gb_s"], theirs["copy_gb_s"]))
    kinds = {(r["kind"], *r["size"]): r for r in ours["products"]}
    for r in filter(_product, theirs["products"]):
        if mine := kinds.get((r["kind"], *r["size"])):
            lines.append(_line(f"{r['kind']} product", "TFLOP/s", mine["tflop_s"], r["tflop_s"]))
    trained = {tuple(r[name] for name in SAME): r for r in ours["trainings"]}
    for r in filter(_training, theirs["trainings"]):
        if mine := trained.get(tuple(r[name] for name in SAME)):
            noise = mine["spread"] + r["spread"]
            same = abs(mine["tok_s"] / r["tok_s"] - 1) <= noise
            note = f"{'within' if same else 'beyond'} the noise of {noise:.1%}"
            lines.append(_line(f"{r['shape']} {r['store']}", "tok/s", mine["tok_s"], r["tok_s"]) + f", {note}")
    return lines if len(lines) > 1 else [*lines, "nothing in common: measure the same shapes, tokens, seq and rank"]


def _product(r) -> bool:
    known = isinstance(r, dict) and isinstance(r.get("kind"), str) and isinstance(r.get("size"), list)
    whole = known and all(type(n) is int for n in r["size"])
    return whole and isinstance(r.get("tflop_s"), int | float) and r["tflop_s"] > 0


def _training(r) -> bool:
    known = isinstance(r, dict) and all(isinstance(r.get(name), str | int) for name in SAME)
    return known and all(isinstance(r.get(name), int | float) for name in ("tok_s", "spread")) and r["tok_s"] > 0


def _line(what: str, unit: str, mine: float, other: float) -> str:
    return f"{what:28} {mine:>12,.5g} {unit:8} there {other:>12,.5g}   {mine / other:6.2f}x"
