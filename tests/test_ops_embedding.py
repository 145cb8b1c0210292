"""Embedding lookup: exact for every stored type, whole or split by rows."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.ops.embedding import embedding_forward
from lorawgpu.reference import embedding as reference


def stored(table, dtype):
    """(what the file holds, its exact float32 value)."""
    if dtype == "bf16":
        bits = (table.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    data = table.astype({"f16": np.float16, "f32": np.float32}[dtype])
    return data, data.astype(np.float32)


def record(lab, dtype, V, width, ids, cuts, scale=1.0):
    table = normal(V, width)
    table[2, :2] = [3e-7, -6e-5][:width]  # subnormal as f16
    data, exact = stored(table, dtype)
    ids = np.asarray(ids, np.int32)
    x = lab.rows(len(ids), width)
    edges = [0, *cuts, V]
    parts = [(a, lab.input(pad(data[a:b]), dtype)) for a, b in zip(edges, edges[1:], strict=False)]
    parts.reverse()  # the order is free: no part may write what belongs to another
    embedding_forward(lab.plan, x.tensor, lab.input(ids), parts, rows=len(ids), width=width, scale=scale)
    return lambda: assert_close(x.value, reference.embedding_forward(ids, exact, np.float32(scale)), 0)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_is_exact(plan, dtype):
    lab = Lab(plan)
    with lab.section:
        checks = [
            record(lab, dtype, 7, 123, [6, 2, 3], []),
            record(lab, dtype, 11, 2560, [2, 10, 4, 5, 4], [5, 6]),
            record(lab, dtype, 5, 1, [2], [2, 3], scale=2.5),
        ]
    lab.run()
    for check in checks:
        check()
