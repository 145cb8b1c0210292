"""Embedding lookup. Equations: shaders/embedding.wgsl."""

from lorawgpu.gpu import padded
from lorawgpu.ops.checks import expect, expect_rows, fold_elements

FORMATS = {"f32": 0, "bf16": 1, "f16": 2}


def embedding_forward(plan, x, ids, parts, *, rows, width, scale=1.0):
    """x [rows, width] = table[ids] * scale.

    ids i32 [rows]; parts: the table split by rows, a list of (first row, Tensor [part rows, padded(width)] as stored:
    bf16, f16 or f32). One record a part; together they must cover every id.
    """
    ld = expect_rows(rows, width, x=x)
    expect("ids", ids, (rows,), "i32")
    for row_start, part in parts:
        expect("part", part, (part.shape[0], padded(width)), *FORMATS)
        plan.record(
            "embedding",
            "forward",
            fold_elements(rows * ld),
            overrides={"FORMAT": FORMATS[part.dtype]},
            params={"rows": rows, "ld4": ld // 4, "row_start": row_start, "part_rows": part.shape[0], "scale": scale},
            nbytes=_moved(x, ids, part),
            ids=ids,
            part=part,
            x=x,
        )


def _moved(x, ids, part) -> int:
    """Bytes: one row of the table for each id."""
    return x.nbytes + ids.nbytes + x.nbytes * part.nbytes // (part.size * 4)
