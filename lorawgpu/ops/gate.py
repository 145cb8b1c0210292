"""The gate of the feed-forward: scale * act(g) * u. Equations and layouts: shaders/gate.wgsl.j2."""

from lorawgpu.gpu import Tensor, padded
from lorawgpu.ops.checks import expect, expect_rows, expect_state, fold_elements

ACTIVATIONS = ("relu2", "silu", "gelu_tanh")  # each has its snippet, shaders/common/activation_<name>.wgsl


def known(act: str) -> str:
    """The name itself. ValueError for one without a snippet."""
    if act not in ACTIVATIONS:
        raise ValueError(f"gate: activation {act!r}, want one of {', '.join(ACTIVATIONS)}")
    return act


def layout_of(gu: Tensor, rows: int, width: int, up_off: int | None, up: Tensor | None) -> str:
    """Where u is: "stacked" or "packed" in gu, or "separate", in `up`. ValueError for tensors without room for both."""
    if up is not None:
        expect_rows(rows, width, gu=gu, up=up)
        return "separate"
    if up_off is None or (up_off, gu.shape[1]) == (padded(width), 2 * padded(width)):
        expect("gu", gu, (rows, 2 * padded(width)))
        return "stacked"
    expect("gu", gu, (rows, padded(gu.shape[1])))
    if not width <= up_off <= gu.shape[1] - width:
        raise ValueError(f"gu ({gu.label}): {gu.shape[1]} columns do not hold g and, from column {up_off} on, u")
    return "packed"


def gate_forward(plan, m, gu, state, *, rows, width, act, record_id, scale=1.0, up_off=None, up=None):
    """m [rows, width] = scale * act(g) * u. act: one of ACTIVATIONS.

    gu holds g from column 0 on, and u from column `up_off` on (None: padded(width), in gu [rows, 2 * padded(width)]).
    With `up` [rows, width], that is u, and gu [rows, width] is g alone.
    """
    ld = expect_rows(rows, width, m=m)
    expect_state(state)
    common = _common(gu, rows, width, act, record_id, scale, up_off, up)
    plan.record("gate", "forward", fold_elements(rows * ld), m=m, state=state, **common)


def gate_backward(plan, dgu, dm, gu, *, rows, width, act, scale=1.0, up_off=None, up=None):
    """dgu = the gradient of gu, in the same layout, from dm [rows, width]. `up` gets no gradient."""
    ld = expect_rows(rows, width, dm=dm)
    expect("dgu", dgu, (rows, *gu.shape[1:]))
    common = _common(gu, rows, width, act, 0, scale, up_off, up)
    columns = gu.shape[1] if common["template"]["layout"] == "packed" else ld
    plan.record("gate", "backward", fold_elements(rows * columns), dm=dm, dgu=dgu, **common)


def _common(gu, rows, width, act, record_id, scale, up_off, up) -> dict:
    """What forward and backward record in common."""
    layout, scaled = layout_of(gu, rows, width, up_off, up), scale != 1.0
    params = {"rows": rows, "ld4": padded(width) // 4, "record_id": record_id}
    params |= {"scale": scale} if scaled else {}
    params |= {"width": width, "up_off": up_off, "ld_gu4": gu.shape[1] // 4} if layout == "packed" else {}
    template = {"act": known(act), "layout": layout, "scaled": scaled}
    return {"params": params, "template": template, "gu": gu, **({"up": up} if up else {})}
