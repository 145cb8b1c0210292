"""Dropout on the adapter path, with a hash as mask. Equations: shaders/dropout.wgsl; the hash: reference/dropout.py."""

from lorawgpu.families.modules import dropout_stream
from lorawgpu.ops.checks import WG, expect_rows, fold_elements


def _record(plan, y, x, step, *, layer, module, rows, width, p, accumulate):
    ld = expect_rows(rows, width, x=x, y=y)
    grid = fold_elements(rows * ld)
    plan.record(
        "dropout",
        "main",
        grid,
        overrides={"ACCUMULATE": accumulate},
        step=step,
        x=x,
        y=y,
        params={
            "rows": rows,
            "ld4": ld // 4,
            "width": width,
            "stream": dropout_stream(layer, module),
            "threshold": int(p * 2**32),
            "keep": 1.0 / (1.0 - p),
            "stride": grid[0] * WG,
        },
    )


def dropout_forward(plan, y, x, step, *, layer, module, rows, width, p):
    """y [rows, width] = x * mask / (1 - p)."""
    _record(plan, y, x, step, layer=layer, module=module, rows=rows, width=width, p=p, accumulate=False)


def dropout_add(plan, y, x, step, *, layer, module, rows, width, p):
    """y += x * mask / (1 - p), with the forward's mask, for the backward."""
    _record(plan, y, x, step, layer=layer, module=module, rows=rows, width=width, p=p, accumulate=True)
