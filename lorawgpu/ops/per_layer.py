"""A layer's input from the tokens themselves (Gemma 4). Equations: shaders/per_layer.wgsl.j2."""

from math import sqrt

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold


def per_layer_forward(plan, y, proj, table_rows, weight, *, rows, width, scale, eps):
    """y [rows, width] = (rmsnorm(scale * proj) + sqrt(width) * table_rows) / sqrt(2), where the norm has `weight`.

    proj f32 [rows, width]; table_rows: one row for each token, [rows, padded(width)] in bf16, f16 or f32, zero past the
    width; weight [padded(width)].
    """
    ld = expect_rows(rows, width, y=y, proj=proj)
    expect("weight", weight, (padded(width),))
    expect("table_rows", table_rows, (rows, ld), "bf16", "f16", "f32")
    plan.record(
        "per_layer",
        "forward",
        fold(rows),
        template={"dtype": table_rows.dtype},
        params={"rows": rows, "ld4": ld // 4, "P": width, "eps": eps, "scale": scale, "row_scale": sqrt(width)},
        proj=proj,
        part=table_rows,
        weight=weight,
        y=y,
    )
