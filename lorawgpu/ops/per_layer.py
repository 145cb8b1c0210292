"""A layer's input from the tokens themselves (Gemma 4). Equations: shaders/per_layer.wgsl.j2."""

from math import sqrt

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold


def per_layer_forward(plan, y, proj, table_rows, weight, *, store, rows, width, scale, eps):
    """y [rows, width] = (rmsnorm(scale * proj) + sqrt(width) * table_rows) / sqrt(2), where the norm has `weight`.

    proj f32 [rows, width]; table_rows: one row for each token, [rows, padded(width)] in `store`, zero past the width;
    weight [padded(width)]. ValueError for a store without a row snippet.
    """
    ld = expect_rows(rows, width, y=y, proj=proj)
    expect("weight", weight, (padded(width),))
    if store.row_snippet is None:
        raise ValueError(f"{table_rows.label}: rows of a {store.name} table cannot be looked up")
    expect("table_rows", table_rows, store.shape(rows, ld), store.dtype)
    plan.record(
        "per_layer",
        "forward",
        fold(rows),
        template={"store": store.row_snippet},
        params={"rows": rows, "ld4": ld // 4, "P": width, "eps": eps, "scale": scale, "row_scale": sqrt(width)},
        proj=proj,
        part=table_rows,
        weight=weight,
        y=y,
    )
