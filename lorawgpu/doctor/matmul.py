"""Matrix and matrix-vector products against NumPy in float64. Each: (lab, what, sizes) -> results; see check.py."""

import numpy as np

from lorawgpu.doctor.elementwise import EPS, stored
from lorawgpu.doctor.lab import normal, pad
from lorawgpu.gpu import padded
from lorawgpu.ops.matmul import LowRank, Segments, matmul, sum_splits
from lorawgpu.ops.matvec import Down, Source, matvec_forward, matvec_input
from lorawgpu.reference.activation import gate_forward
from lorawgpu.reference.quantize import quantize_forward
from lorawgpu.weights.device import Part, Weight, dense_weight, pack_blocks

SCALES = 0.5, 2.0, 3.0  # of three segments


def ternary(rows, columns):
    """Codes T + 1 of a random matrix, and T."""
    codes = np.random.default_rng((rows, columns)).integers(0, 3, (rows, columns)).astype(np.uint8)
    return codes, codes.astype(np.float64) - 1


def quantised(x):
    """int8 words, `qscale` as the quantiser leaves them, and the values they stand for."""
    xq, s = quantize_forward(x)
    qscale = np.stack([1 / s, xq.sum(1, dtype=np.int32).view(np.float32)], 1).astype(np.float32)
    return xq.view(np.uint32), qscale, xq.astype(np.float64) * qscale[:, :1]


def segments_of(rows):
    """Three segments of `rows` stacked rows, and the scale of each row."""
    third = padded(rows // 3)
    ends = third, 2 * third, rows
    return Segments(ends, SCALES), np.repeat(SCALES, np.diff((0, *ends)))


def matmul_tiles(lab, tile, a_layout, b_layout, m, n, k):
    a, b = normal(m, k), normal(n, k, seed=1)
    stored_a = pad(a.T) if a_layout == "col" else a
    out = lab.output(m, n)
    sizes = {"m": m, "n": n, "k": k, "a_layout": a_layout, "b_layout": b_layout, "tile": tile}
    matmul(lab.plan, out.tensor, lab.input(stored_a), lab.input(b if b_layout == "nk" else b.T), **sizes)
    return lambda: {"product": (out.value, a.astype(np.float64) @ b.T)}


def matmul_stores(lab, store, b_layout, m, n, k):
    """A stored weight [n, k], forward (nk) or transposed (kn)."""
    if store == "ternary":
        (codes, value), (segments, scale) = ternary(n, k), segments_of(n)
        data, value, ldb = pack_blocks(codes), value * scale[:, None], k // 4
    else:
        weight = stored(normal(n, k), store)
        data, value, ldb, segments = weight.data, weight.float32().astype(np.float64), k, None
    terms, columns = (k, n) if b_layout == "nk" else (n, k)
    a, out = normal(m, terms, seed=1), lab.output(m, columns)
    layout = {"store": store, "b_layout": b_layout, "ldb": ldb, "segments": segments}
    b = lab.input(data, store if store == "bf16" else None)
    matmul(lab.plan, out.tensor, lab.input(a), b, m=m, n=columns, k=terms, **layout)
    return lambda: {"product": (out.value, a @ (value.T if b_layout == "nk" else value))}


def matmul_int8(lab, tile, m, n, k):
    """An integer product, so exact; scaled by one float32 product a row."""
    codes, T = ternary(n, k)
    words, qscale, _ = quantised(normal(m, k))
    out = lab.output(m, n)
    layout = {"lda": k // 4, "store": "ternary", "ldb": k // 4, "segments": Segments((n,), (1.0,)), "tile": tile}
    b = lab.input(pack_blocks(codes))
    matmul(lab.plan, out.tensor, lab.input(words), b, m=m, n=n, k=k, qscale=lab.input(qscale), **layout)
    want = (words.view(np.int8) @ T.T).astype(np.float32) * qscale[:, :1]
    return lambda: {"product": (out.value, want)}


def matmul_epilogue(lab, arith, m, n, k, rank):
    """y (+)= x W^T + h B^T + residual with three segments, the second without an adapter."""
    (codes, T), (segments, scale) = ternary(n, k), segments_of(n)
    x, residual, start = normal(m, k), normal(m, n, seed=1), normal(m, n, seed=2)
    h, widths = normal(m, 2 * rank, seed=3), np.diff((0, *segments.ends))
    first, third = normal(widths[0], rank, seed=4), normal(widths[2], rank, seed=5)
    factors = lab.input(np.concatenate([first.ravel(), third.ravel()]))
    lora = LowRank("nk", lab.input(h), factors, (rank, 0, rank), (0, 0, rank), (0, 0, first.size))
    out, accumulate = lab.output(m, n, initial=start), arith == "f32"
    kwargs = {"lda": k, "accumulate": accumulate}
    a, value = x, x.astype(np.float64)
    if arith == "int8":
        a, qscale, value = quantised(x)
        kwargs = {"lda": k // 4, "qscale": lab.input(qscale)}
    kwargs |= {"store": "ternary", "ldb": k // 4, "segments": segments, "lora": lora, "residual": lab.input(residual)}
    matmul(lab.plan, out.tensor, lab.input(a), lab.input(pack_blocks(codes)), m=m, n=n, k=k, **kwargs)
    want = value @ (T * scale[:, None]).T + residual + accumulate * start
    want[:, : widths[0]] += h[:, :rank] @ first.T
    want[:, segments.ends[1] :] += h[:, rank:] @ third.T
    return lambda: {"y": (out.value, want)}


def matmul_backward(lab, m, n, k, rank):
    """dx = dy W + dh A."""
    dy, w, dh, a = normal(m, k), normal(k, n), normal(m, rank), normal(rank, n)
    out = lab.output(m, n)
    lora = LowRank("kn", lab.input(dh), lab.input(a), (rank,), (0,), (0,))
    matmul(lab.plan, out.tensor, lab.input(dy), lab.input(w), m=m, n=n, k=k, b_layout="kn", lora=lora)
    return lambda: {"dx": (out.value, dy.astype(np.float64) @ w + dh.astype(np.float64) @ a)}


def matmul_splits(lab, splits, m, n, k):
    """A long reduction in parts, then their sum, added to what is there."""
    a, b, start = normal(k, padded(m)), normal(k, n, seed=1), normal(m, n, seed=2)
    parts, out = lab.output(splits, m, n), lab.output(m, n, initial=start)
    sizes = {"m": m, "n": n, "k": k, "splits": splits, "alpha": 0.5}
    matmul(lab.plan, parts.exact, lab.input(a), lab.input(b), a_layout="col", b_layout="kn", **sizes)
    sum_splits(lab.plan, out.tensor, parts.exact, accumulate=True)
    return lambda: {"sum": (out.value, start + 0.5 * a[:, :m].T.astype(np.float64) @ b)}


def matvec_dense(lab, dtype, rows, out, inner):
    dense = stored(normal(out, inner), dtype)
    x, y = normal(rows, inner, seed=1), lab.rows(rows, out)
    added = lab.rows(rows, out, pad(normal(rows, out)))
    weight = dense_weight(lab.device, [dense], "weight")
    for result, accumulate in ((y, False), (added, True)):
        matvec_forward(lab.plan, result.tensor, lab.padded(x), weight, rows=rows, accumulate=accumulate)
    want = x.astype(np.float64) @ dense.float32().T
    return lambda: {"y": (y.value, want), "added": (added.value, want + normal(rows, out))}


def matvec_ternary(lab, rows, out, inner, rank):
    """Three segments with an adapter on the last."""
    (codes, T), (segments, scale) = ternary(out, inner), segments_of(out)
    words, qscale, value = quantised(normal(rows, inner))
    begin = segments.ends[1]
    h, factor, y = normal(rows, rank), normal(out - begin, rank), lab.rows(rows, out)
    lora = LowRank("nk", lab.input(h), lab.input(factor), (0, 0, rank), (0, 0, 0), (0, 0, 0))
    part = Part(0, out, lab.input(pack_blocks(codes)))
    weight = Weight(out, inner, "ternary", segments, (part,), int8_input=True)
    matvec_forward(lab.plan, y.tensor, lab.input(words), weight, rows=rows, qscale=lab.input(qscale), lora=lora)
    want = value @ (T * scale[:, None]).T
    want[:, begin:] += h @ factor.T
    return lambda: {"y": (y.value, want)}


def _source(lab, kind, rows, width, head_dim=8):
    """What a projection reads, and the values that it stands for, [rows, width] float64."""
    if kind == "rows":
        x = normal(rows, width)
        return Source("rows", lab.padded(x)), x.astype(np.float64)
    if kind != "attention":
        g, u = normal(rows, width), normal(rows, width, seed=1)
        gu = lab.input(np.concatenate([pad(g), pad(u)], axis=1))
        return Source("gate", gu, act=kind), gate_forward(g.astype(np.float64), u, kind)
    heads, splits, used = width // head_dim, 32, 11
    parts, stats = normal(rows, splits, padded(width)), np.zeros((rows, splits, heads, 4), np.float32)
    stats[..., 0], stats[..., 1], stats[..., 2] = normal(rows, splits, heads), 1.5, used
    weight = np.exp2(stats[:, :used, :, 0].astype(np.float64))[..., None]
    sums = (weight * parts[:, :used, :width].reshape(rows, used, heads, head_dim)).sum(1)
    value = sums / (1.5 * weight.sum(1))
    return Source(kind, lab.input(parts), stats=lab.input(stats), head_dim=head_dim), value.reshape(rows, width)


def matvec_source(lab, kind, arith, rows, width):
    """The norm before a projection, its adapters' A, and with int8 its quantiser."""
    quantise = arith == "int8"
    source, v = _source(lab, kind, rows, width)
    weight, a, h = normal(width, seed=5), normal(12, width, seed=6), lab.output(rows, 12)
    ld, state = padded(width), lab.state()
    out = lab.output(rows, ld // 4, dtype="u32") if quantise else lab.output(rows, ld)
    qscale = lab.output(rows, 2, dtype="u32") if quantise else None
    buffers = {"weight": lab.input(pad(weight[None])[0]), "qscale": qscale.tensor if quantise else None}
    down = Down(h.tensor, lab.padded(a), ((0, 2.0), (4, 0.5)))
    shape = {"rows": rows, "width": width, "eps": EPS, "record_id": 3}
    matvec_input(lab.plan, out.tensor, source, state.tensor, down=down, **shape, **buffers)
    n = v / np.sqrt((v**2).mean(1, keepdims=True) + EPS) * weight

    def results():
        found = {"h": (h.value, n @ a.T * np.repeat([2.0, 0.5], [4, 8])), "state": (state.value, np.zeros(16))}
        if not quantise:
            return found | {"n": (out.value, n)}
        codes, s = quantize_forward(n)
        off = out.value.view(np.int8)[:, :width] - codes.astype(np.int16)  # float32 may round a near tie the other way
        many = (off != 0).mean() > 2e-3 or np.abs(off).max() > 1
        return found | {"1/s": (qscale.value[:, 0].view(np.float32), 1 / s), "codes": (many * off, np.zeros(off.shape))}

    return results
