"""Compares results with a golden case: tolerances, and messages for what exceeds them."""

import sys
from dataclasses import dataclass

import numpy as np

from lorawgpu.verify.cases import GoldenCase, Result

GREEDY_GAP, FLIP_GREEDY_GAP = 1e-3, 0.1  # a choice with a smaller logit margin may differ
TINY = 1e-4  # gradient relative to the largest of its tensor: float32 sums err by 1e-6 of that
SINGLE_SHARE = 0.9  # of a squared difference: one element with more is blamed for all of it
QUANTITIES = {  # key of a JSON line: the quantity's name in case.json's `float32_vs_float64`
    "loss_abs_err": "loss",
    "logits_rel": "logits",
    "grad_rel_max": "grad",
    "grad_norm_rel_max": "grad_norm",
    "step_loss_abs_err": "step_losses",
    "after3_rel_max": "after3",
}


@dataclass(frozen=True)
class Check:
    key: str  # in the JSON line
    error: float
    tolerance: float
    where: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def relative_error(got, expected) -> float:
    """||got - expected|| / ||expected||; only the numerator if expected is 0."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / (np.linalg.norm(expected) or 1.0))


def compare(case: GoldenCase, result: Result) -> list[Check]:
    """All numeric comparisons of a case: one per quantity and phase, with the worst tensor or step."""
    x, checks = case.expected, []

    def add(key, phase, errors: dict):
        if errors:
            where = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
            checks.append(Check(key, errors[where], case.tolerance(QUANTITIES[key], phase), where))

    if "loss" in x:
        add("loss_abs_err", "loss", {"": abs(result.loss - float(x["loss"]))})
    if "logits" in x:
        add("logits_rel", "loss", {"": relative_error(result.logits, x["logits"][case.mask])})
    add("grad_rel_max", "loss", {n: relative_error(result.grads[n], g) for n, g in case.part("grad").items()})
    norms = case.part("grad_norm").items()
    add("grad_norm_rel_max", "loss", {n: relative_error(np.linalg.norm(result.grads[n]), g) for n, g in norms})
    for key, name, error in (
        ("grad_norm_rel_max", "grad_norms", relative_error),
        ("step_loss_abs_err", "step_losses", lambda got, want: abs(got - float(want))),
    ):
        if name in x:
            pairs = enumerate(zip(getattr(result, name), x[name], strict=True), 1)
            add(key, "steps", {f"step {i}": error(got, want) for i, (got, want) in pairs})
    updates = {}
    for name, stepped in case.part("after3").items():
        start = case.tensors[name].astype(np.float64)  # compare only the update, which is small next to the start
        updates[name] = relative_error(result.after3[name] - start, stepped - start)
    add("after3_rel_max", "steps", updates)
    return checks


def lone_element(case: GoldenCase, result: Result, name: str) -> str | None:
    """An explanation for an update that differs in a single element with a tiny gradient, else None.

    Adam divides a gradient by its own size. So rounding that is negligible in the tensor's gradients becomes a full
    update where the gradient is equally small.
    """
    gradient = case.expected.get(f"grad.{name}")
    off = np.abs(np.asarray(result.after3[name], np.float64) - case.expected[f"after3.{name}"])
    if gradient is None or not np.isfinite(off).all():
        return None
    at = np.unravel_index(off.argmax(), off.shape)
    size, share = abs(gradient[at]) / np.abs(gradient).max(), off[at] ** 2 / np.square(off).sum()
    if size > TINY or share < SINGLE_SHARE:
        return None
    return (
        f"{share:.0%} of it is element {list(map(int, at))}, whose gradient is {size:.0e} of its tensor's largest. "
        "Adam magnifies the rounding of so small a gradient: if the gradients are ok, the device probably is too"
    )


def greedy_difference(case: GoldenCase, kind: str, logits: np.ndarray) -> str | None:
    """The first choice of `kind` ("greedy" or "base_greedy") that differs though it may not, or None.

    logits: [tokens, V] before each expected token, with the expected tokens as input. If the case has no margins, ours
    are used: how far the expected token is below our choice.
    """
    allowed = FLIP_GREEDY_GAP if case.may_flip("greedy") else GREEDY_GAP
    gaps = case.expected.get(f"{kind}_gap")
    for i, (row, token) in enumerate(zip(logits, case.expected[kind], strict=True)):
        choice = int(row.argmax())
        gap = row[choice] - row[token] if gaps is None else gaps[i]
        if not np.isfinite(row).all() or (choice != token and not gap < allowed):
            return f"{kind} token {i + 1} is {choice}, expected {token} (margin {gap:.3g}, allowed below {allowed:g})"
    return None


def judge(case: GoldenCase, result: Result) -> tuple[dict, list]:
    """The JSON line of a case, and a message for everything that is not ok."""
    checks = compare(case, result)
    faults = [_fault(case, result, check) for check in checks if not check.ok]
    matches = {}
    for kind in ("greedy", "base_greedy"):
        if kind in case.expected:
            difference = greedy_difference(case, kind, getattr(result, kind))
            matches[kind] = difference is None
            faults += [difference] if difference else []
    row, tolerance = {"case": case.name}, {}
    for key, quantity in QUANTITIES.items():
        mine = [c for c in checks if c.key == key]
        worst = max(mine, key=lambda c: _finite(c.error), default=None)
        row[key] = _finite(worst.error) if worst else None
        tolerance[quantity] = max(c.tolerance for c in mine) if mine else None
        if key == "grad_rel_max":
            row["grad_worst"] = worst.where if worst else None
    row |= {"greedy_match": matches.get("greedy"), "tolerance": tolerance, "ok": not faults}
    return row, faults


def _fault(case: GoldenCase, result: Result, check: Check) -> str:
    text = f"{check.key} {check.error:.3g} exceeds {check.tolerance:.3g} {check.where}".rstrip()
    hint = lone_element(case, result, check.where) if check.key == "after3_rel_max" else None
    return f"{text}; {hint}" if hint else text


def _finite(error: float) -> float:
    """The largest float in place of NaN and infinity, which JSON does not have."""
    return float(np.nan_to_num(error, nan=sys.float_info.max, posinf=sys.float_info.max))
