"""Embedding lookup. Equations: shaders/embedding.wgsl.j2."""

from lorawgpu.ops.checks import expect, expect_rows, fold_elements


def embedding_forward(plan, x, ids, parts, *, rows, width, scale=1.0):
    """x [rows, width] = table[ids] * scale.

    ids i32 [rows]; parts: the `Part`s of a `Weight`, which together cover every id; one record per part.
    ValueError for a store without a row snippet.
    """
    ld = expect_rows(rows, width, x=x)
    expect("ids", ids, (rows,), "i32")
    for part in parts:
        store, table = part.store, part.tensor
        if store.row_snippet is None:
            raise ValueError(f"{table.label}: rows of a {store.name} table cannot be looked up")
        expect("part", table, store.shape(part.rows, ld), store.dtype)
        plan.record(
            "embedding",
            "forward",
            fold_elements(rows * ld),
            template={"store": store.row_snippet},
            params={"rows": rows, "ld4": ld // 4, "row_start": part.start, "part_rows": part.rows, "scale": scale},
            nbytes=x.nbytes + ids.nbytes + x.size * table.nbytes // (part.rows * ld),  # one table row per id
            ids=ids,
            part=table,
            x=x,
        )
