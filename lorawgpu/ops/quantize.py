"""The int8 quantiser before a BitLinear, alone or with the RMSNorm before it. Equations: shaders/quantize.wgsl.

Its backward is the identity (straight through), so there is none; the norm's is ops/rmsnorm.py.
"""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, expect_state, fold


def quantize_forward(plan, xq, qscale, x, state, *, rows, width, record_id):
    """xq u32 [rows, padded(width)/4] and qscale u32 [rows, 2] (bits of f32 1/s, i32 sum of xq) from x [rows, width]."""
    ld = expect_rows(rows, width, x=x)
    expect_quantised(xq, qscale, state, rows, ld)
    plan.record(
        "quantize",
        "quantize",
        fold(rows),
        params={"rows": rows, "ld4": ld // 4, "C": width, "eps": 0.0, "record_id": record_id},
        x=x,
        xq=xq,
        qscale=qscale,
        state=state,
    )


def rmsnorm_quantize_forward(plan, y, rstd, xq, qscale, x, weight, state, *, rows, width, eps, record_id):
    """The same of the normalised rows; also rstd [rows] and, unless y is None, those rows, y [rows, width]."""
    ld = expect_rows(rows, width, x=x, **({"y": y} if y else {}))
    expect("weight", weight, (padded(width),))
    expect("rstd", rstd, (rows,))
    expect_quantised(xq, qscale, state, rows, ld)
    buffers = {"y": y} if y else {}
    plan.record(
        "quantize",
        "rmsnorm_quantize_keep" if y else "rmsnorm_quantize",
        fold(rows),
        params={"rows": rows, "ld4": ld // 4, "C": width, "eps": eps, "record_id": record_id},
        x=x,
        weight=weight,
        rstd=rstd,
        xq=xq,
        qscale=qscale,
        state=state,
        **buffers,
    )


def expect_quantised(xq, qscale, state, rows, ld):
    expect("xq", xq, (rows, ld // 4), "u32")
    expect("qscale", qscale, (rows, 2), "u32", "f32")
    expect_state(state)
