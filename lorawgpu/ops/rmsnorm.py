"""RMSNorm. Equations and saved tensors: shaders/rmsnorm.wgsl.j2."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold


def rmsnorm_forward(plan, y, rstd, x, weight, *, rows, width, eps, residual=None, out_scale=1.0):
    """y [rows, width] = rmsnorm(x) (+ residual), rstd [rows], from x [rows, width] and weight [padded(width)].

    out_scale multiplies the sum. ValueError for one without a residual. `rmsnorm_backward` then wants dy * out_scale,
    and so does the residual: ops.scale.
    """
    added = {} if residual is None else {"residual": residual}
    scaled = out_scale != 1.0
    if scaled and not added:
        raise ValueError("rmsnorm: out_scale multiplies a sum with a residual, and there is none")
    ld = expect_rows(rows, width, x=x, y=y, **added)
    expect("weight", weight, (padded(width),))
    expect("rstd", rstd, (rows,))
    plan.record(
        "rmsnorm",
        "add" if added else "forward",
        fold(rows),
        template={"scaled": scaled},
        params={"rows": rows, "ld4": ld // 4, "C": width, "eps": eps, **({"out_scale": out_scale} if scaled else {})},
        x=x,
        weight=weight,
        y=y,
        rstd_out=rstd,
        **added,
    )


def rmsnorm_backward(plan, dx, dy, x, weight, rstd, *, rows, width, accumulate):
    """dx (+)= the gradient of x, given dy. x and rstd are the forward's."""
    ld = expect_rows(rows, width, x=x, dy=dy, dx=dx)
    expect("weight", weight, (padded(width),))
    expect("rstd", rstd, (rows,))
    plan.record(
        "rmsnorm",
        "backward",
        fold(rows),
        template={"scaled": False},
        overrides={"ACCUMULATE": accumulate},
        params={"rows": rows, "ld4": ld // 4, "C": width, "eps": 0.0},
        x=x,
        weight=weight,
        dy=dy,
        rstd=rstd,
        dx=dx,
    )
