"""The int8 quantizer before a BitLinear, with or without the RMSNorm before it. Equations: shaders/quantize.wgsl.

The quantizer's backward is the identity (straight through), so it has no op; the norm's is in ops/rmsnorm.py.
"""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, expect_state, fold


def quantize_forward(plan, xq, qscale, x, state, *, rows, width, record_id):
    """Quantize x [rows, width] to xq u32 [rows, padded(width)/4].

    qscale u32 [rows, 2]: the bits of f32 1/s, and the i32 sum of the row of xq.
    """
    ld = expect_rows(rows, width, x=x)
    expect_quantized(xq, qscale, state, rows, ld)
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
    """Normalize, then quantize. Also writes rstd [rows] and, unless y is None, the normalized rows y [rows, width]."""
    ld = expect_rows(rows, width, x=x, **({"y": y} if y else {}))
    expect("weight", weight, (padded(width),))
    expect("rstd", rstd, (rows,))
    expect_quantized(xq, qscale, state, rows, ld)
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


def expect_quantized(xq, qscale, state, rows, ld):
    expect("xq", xq, (rows, ld // 4), "u32")
    expect("qscale", qscale, (rows, 2), "u32", "f32")
    expect_state(state)
