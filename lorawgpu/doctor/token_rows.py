"""The check of trained rows: ids repeat, tail rows take no part, and some ids have no row."""

import numpy as np

from lorawgpu.doctor.lab import normal, pad
from lorawgpu.ops.token_rows import columns_backward, columns_forward, rows_backward, rows_forward
from lorawgpu.reference import token_rows as reference

VOCAB = 11


def token_rows(lab, rows, width, scale=1.0):
    """Three trained ids of VOCAB, and a table cut by rows [4, 9), over `rows` tokens of which the last is the tail."""
    ids = (np.arange(rows) ** 2 % VOCAB).astype(np.int32)
    own = np.array([9, 1, 4], np.int32)
    row_of = np.full(VOCAB, -1, np.int32)
    row_of[own] = np.arange(3)
    order = np.append(np.argsort(ids[:-1], kind="stable"), -1).astype(np.int32)
    table, x, dx = normal(3, width), normal(rows, width, seed=1), normal(rows, width, seed=2)
    drows, dpart = normal(3, width, seed=3), normal(5, width, seed=4)
    lists = lab.input(ids), lab.input(order)
    looked, total, part = lab.rows(rows, width, pad(x)), lab.rows(3, width, pad(drows)), lab.rows(5, width, pad(dpart))
    shape, gdx = {"rows": rows, "width": width, "scale": scale}, lab.padded(dx)
    rows_forward(lab.plan, looked.tensor, lists[0], lab.input(row_of), lab.padded(table), **shape)
    rows_backward(lab.plan, total.exact, gdx, *lists, row_of=lab.input(row_of), **shape)
    rows_backward(lab.plan, part.exact, gdx, *lists, first=4, **shape)
    everything = reference.rows_backward(dx[:-1], ids[:-1], np.arange(VOCAB), VOCAB, scale)
    return lambda: {
        "lookup": (looked.value, pad(reference.rows_forward(x, ids, row_of, table, scale))),
        "rows": (total.value, pad(drows + everything[own])),
        "part": (part.value, pad(dpart + everything[4:9])),
    }


def token_columns(lab, rows, vocab):
    """Three columns of the logits, put there and taken out of their gradient."""
    ids, small, z = np.array([vocab - 1, 0, 3], np.int32), normal(rows, 3), normal(rows, vocab, seed=1)
    put, taken, dsmall = lab.rows(rows, vocab, pad(z)), lab.rows(rows, vocab, pad(z)), lab.rows(rows, 3)
    columns_forward(lab.plan, put.exact, lab.padded(small), lab.input(ids), rows=rows)
    columns_backward(lab.plan, dsmall.exact, taken.exact, lab.input(ids), rows=rows)
    rest, own = reference.columns_backward(z, ids)
    return lambda: {
        "put": (put.value, pad(reference.columns_forward(z, ids, small))),
        "taken": (taken.value, pad(rest)),
        "gradient": (dsmall.value, pad(own)),
    }
