"""Trained rows of the embedding and the head, and the gradient of a table. Equations: shaders/token_rows.wgsl."""

from lorawgpu.ops.checks import expect, expect_rows, fold_elements

_NONE = {"rows": 0, "ld": 0, "ldv": 0, "first": 0, "count": 0, "scale": 0.0}


def rows_forward(plan, x, ids, row_of, table, *, rows, width, scale=1.0):
    """x[t] = table[row_of[ids[t]]] * scale for the ids with a row; other rows of x [rows, width] stay as they are.

    ids i32 [rows]; row_of i32 [V], -1 for none; table f32 [any, width].
    """
    ld = expect_rows(rows, width, x=x)
    expect("ids", ids, (rows,), "i32")
    expect("table", table, (1, ld))
    params = _NONE | {"rows": rows, "ld": ld, "scale": scale}
    tensors = {"ids": ids, "row_of": row_of, "rows": table, "x": x}
    plan.record("token_rows", "lookup", fold_elements(rows * ld), params=params, nbytes=2 * x.nbytes, **tensors)


def rows_backward(plan, dtable, dx, ids, order, *, rows, width, scale=1.0, row_of=None, first=0):
    """dtable[row] += scale * the sum of dx over the rows of its id, in their order.

    The row of an id is row_of[id], or without that id - `first`, as far as dtable f32 [any, width] has it. order i32
    [rows]: the rows sorted by id, equal ids by position, then -1.
    """
    ld = expect_rows(rows, width, dx=dx)
    expect("ids", ids, (rows,), "i32")
    expect("order", order, (rows,), "i32")
    expect("dtable", dtable, (1, ld))
    params = _NONE | {"rows": rows, "ld": ld, "first": first, "count": dtable.shape[0], "scale": scale}
    tensors = {"ids": ids, "order": order, "dx": dx, "drows": dtable} | ({"row_of": row_of} if row_of else {})
    entry = "add_own" if row_of else "add_rows"
    plan.record("token_rows", entry, fold_elements(rows * ld), params=params, nbytes=2 * dx.nbytes, **tensors)


def columns_forward(plan, logits, small, ids, *, rows):
    """logits[:, ids[k]] = small[:, k], for logits [rows, any], small [rows, at least n] and ids i32 [n]."""
    _columns(plan, "put", logits, small, ids, rows)


def columns_backward(plan, dsmall, dlogits, ids, *, rows):
    """dsmall[:, k] = dlogits[:, ids[k]], 0 in its padding; these columns of dlogits become 0."""
    _columns(plan, "take", dlogits, dsmall, ids, rows)


def _columns(plan, entry, logits, small, ids, rows):
    params = _NONE | {"rows": rows, "ld": small.shape[1], "ldv": logits.shape[1], "count": ids.shape[0]}
    tensors = {"ids": ids, "small": small, "logits": logits}
    size = rows * small.shape[1]
    plan.record("token_rows", entry, fold_elements(size, 1), params=params, nbytes=8 * size, **tensors)
