"""Dropout on the adapter path, with a hash as mask. Equations: shaders/dropout.wgsl; the hash: reference/dropout.py.

`first_row`: the token of row 0, where x is a block of rows.
"""

from lorawgpu.families.modules import dropout_stream
from lorawgpu.ops.checks import WG, expect_rows, fold_elements


def _record(plan, y, x, step, *, layer, module, rows, width, p, first_row, accumulate):
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
            "first_row": first_row,
        },
    )


def dropout_forward(plan, y, x, step, *, layer, module, rows, width, p, first_row=0):
    """y [rows, width] = x * mask / (1 - p)."""
    options = {"rows": rows, "width": width, "p": p, "first_row": first_row}
    _record(plan, y, x, step, layer=layer, module=module, **options, accumulate=False)


def dropout_add(plan, y, x, step, *, layer, module, rows, width, p, first_row=0):
    """y += x * mask / (1 - p), with the forward's mask, for the backward."""
    options = {"rows": rows, "width": width, "p": p, "first_row": first_row}
    _record(plan, y, x, step, layer=layer, module=module, **options, accumulate=True)
