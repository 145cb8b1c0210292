"""The gate of the feed-forward: act(g) * u. Equations and layout: shaders/gate.wgsl.j2."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, expect_state, fold_elements

ACTIVATIONS = ("relu2", "silu")  # each has its snippet, shaders/common/activation_<name>.wgsl


def known(act: str) -> str:
    """The name itself. ValueError for one without a snippet."""
    if act not in ACTIVATIONS:
        raise ValueError(f"gate: activation {act!r}, want one of {', '.join(ACTIVATIONS)}")
    return act


def gate_forward(plan, m, gu, state, *, rows, width, act, record_id):
    """m [rows, width] = act(g) * u; gu [rows, 2 * padded(width)] holds g, then u. act: one of ACTIVATIONS."""
    ld = expect_rows(rows, width, m=m)
    expect("gu", gu, (rows, 2 * ld))
    expect_state(state)
    plan.record(
        "gate",
        "forward",
        fold_elements(rows * ld),
        template={"act": known(act)},
        params={"rows": rows, "ld4": ld // 4, "record_id": record_id},
        gu=gu,
        m=m,
        state=state,
    )


def gate_backward(plan, dgu, dm, gu, *, rows, width, act):
    """dgu = the gradient of gu, in the same layout, from dm [rows, width]."""
    ld = expect_rows(rows, width, dm=dm)
    expect("gu", gu, (rows, 2 * padded(width)))
    expect("dgu", dgu, (rows, 2 * padded(width)))
    plan.record(
        "gate",
        "backward",
        fold_elements(rows * ld),
        template={"act": known(act)},
        params={"rows": rows, "ld4": ld // 4, "record_id": 0},
        gu=gu,
        dm=dm,
        dgu=dgu,
    )
