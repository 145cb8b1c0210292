"""Embedding lookup. Equations: shaders/embedding.wgsl.j2."""

from lorawgpu.ops.checks import expect, expect_rows, fold_elements


def embedding_forward(plan, x, ids, parts, *, rows, width, vocab, scale=1.0):
    """x [rows, width] = table[ids] * scale; NaN for ids that are not in [0, vocab).

    ids i32 [rows]; parts: the `Part`s of a `Weight`, which together cover every id; one record per part.
    ValueError for a store whose rows cannot be looked up.
    """
    ld = expect_rows(rows, width, x=x)
    expect("ids", ids, (rows,), "i32")
    for part in parts:
        store, table = part.store, part.tensor
        if store.lookup is None:
            raise ValueError(f"{table.label}: rows of a {store.name} table cannot be looked up")
        expect("part", table, store.shape(part.rows, ld), store.dtype)
        params = {"rows": rows, "ld4": ld // 4, "row_start": part.start, "part_rows": part.rows} | {
            "vocab": vocab,
            "scale": scale,
        }
        by_row = store.lookup == "row"
        plan.record(
            "embedding",
            "forward",
            fold_elements(rows * ld),
            template={"store": store.name, "lookup": store.lookup},
            params=params if by_row else params | {"ldb4": ld // 4},
            nbytes=x.nbytes + ids.nbytes + x.size * table.nbytes // (part.rows * ld),  # one table row per id
            ids=ids,
            x=x,
            **{"part" if by_row else "b": table},
        )
