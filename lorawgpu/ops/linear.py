"""A frozen weight and the adapters on it. y = x W^T + scale (d(x) A^T) B^T, and its gradients (DESIGN section 1).

The adapter's scale is folded into both skinny products (h = scale d(x) A^T and dh = scale dy B), so everything that
follows uses h and dh as they are: y += h B^T, dB += dy^T h, dA += dh^T d(x), dx += dh A.
"""

from math import gcd

from ..gpu.tensor import padded
from .dropout import dropout_add, dropout_forward
from .matmul import DEPTH, LowRank, Segments, matmul, sum_splits, workgroups

SPLIT_TERMS = 128  # terms of a long reduction that one workgroup sums before the partial sums are added in order
MAX_SPLITS = 32
SEGMENT_ALIGN = 64  # rows of a skinny tile: a tile must not straddle two linears
SPREAD = 800  # workgroups that a gradient is spread over, by splitting its reduction, when it has few rows


def _splits(terms: int) -> int:
    return max(1, min(MAX_SPLITS, terms // SPLIT_TERMS))


def _split_matmul(plan, work, out, a, b, *, m, n, k, o_off=0, accumulate=False, splits=1, **kwargs):
    """A product with a long reduction and a small result: sums of fixed spans, then their sum in order."""
    if splits == 1:
        return matmul(plan, out, a, b, m=m, n=n, k=k, o_off=o_off, accumulate=accumulate, **kwargs)
    parts = work.take((splits, m, n), label="split sums")
    matmul(plan, parts, a, b, m=m, n=n, k=k, splits=splits, **kwargs)
    sum_splits(plan, out, parts, accumulate=accumulate, o_off=o_off)
    work.give(parts)


def in_part(part, weight, lora) -> tuple:
    """Segments and LoRA term of the rows [start, stop) of a weight that is split into bindings."""
    ends = [min(e, part.stop) - part.start for e in weight.segments.ends if e > part.start]
    first = len(weight.segments.ends) - len(ends)
    segments = Segments(tuple(ends), weight.segments.scales[first : first + len(ends)])
    if lora is None:
        return segments, None
    begins = [0, *weight.segments.ends][first : first + len(ends)]
    skipped = [max(part.start - b, 0) * r for b, r in zip(begins, lora.ranks[first:], strict=False)]
    f_offs = tuple(f + s for f, s in zip(lora.f_offs[first:], skipped, strict=False))
    return segments, LowRank("nk", lora.h, lora.factors, lora.ranks[first:], lora.h_offs[first:], f_offs)


def linear_forward(plan, y, x, weight, *, rows, qscale=None, lora=None, residual=None):
    """y [rows, weight.rows] = x W^T (+ lora) (+ residual).

    x f32 [rows, weight.columns], or with qscale int8 words [rows, columns/4] of the quantiser.
    """
    for part in weight.parts:
        segments, low_rank = in_part(part, weight, lora)
        matmul(
            plan,
            y,
            x,
            part.tensor,
            m=rows,
            n=part.stop - part.start,
            k=weight.columns,
            store=weight.store,
            ldb=weight.stride,
            o_off=part.start,
            qscale=qscale,
            lora=low_rank,
            residual=residual,
            segments=segments,
        )


def linear_backward(plan, work, dx, dy, weight, *, rows, lora=None):
    """dx [rows, weight.columns] = dy W (+ dh A)."""
    for i, part in enumerate(weight.parts):
        segments, _ = in_part(part, weight, None)
        terms = part.stop - part.start
        splits = max(1, min(-(-SPREAD // workgroups(rows, weight.columns)), terms // (2 * SPLIT_TERMS)))
        _split_matmul(
            plan,
            work,
            dx,
            dy,
            part.tensor,
            m=rows,
            n=weight.columns,
            k=terms,
            store=weight.store,
            b_layout="kn",
            ldb=weight.stride,
            a_off=part.start,
            accumulate=i > 0,
            lora=None if i else lora,
            segments=segments,
            splits=splits,
        )


def _same_scale(group) -> bool:
    return len({p.scale for p in group.paths}) == 1


def lora_down(plan, work, h, x, group, params, *, rows, width, step=None, p=0.0):
    """h [rows, rank] = scale d(x) A^T for all paths of `group` at once, path by path where dropout differs."""
    columns = group.paths[0].a.stored[1]
    if p == 0.0 and _same_scale(group):
        return _split_matmul(
            plan,
            work,
            h,
            x,
            group.a_all(params),
            m=rows,
            n=group.rank,
            k=columns,
            alpha=group.paths[0].scale,
            splits=_splits(columns),
        )
    for path in group.paths:
        source = dropped(plan, work, x, group, path, rows=rows, width=width, step=step, p=p)
        _split_matmul(
            plan,
            work,
            h,
            source,
            params.view(path.a.start, path.a.stored),
            m=rows,
            n=path.rank,
            k=columns,
            o_off=path.h,
            alpha=path.scale,
            splits=_splits(columns),
        )
        if p:
            work.give(source)


def dropped(plan, work, x, group, path, *, rows, width, step, p):
    """d(x) of one path: x itself without dropout, else a scratch copy with the path's mask applied."""
    if p == 0.0:
        return x
    out = work.take((rows, padded(width)), label="d(x)")
    dropout_forward(plan, out, x, step, layer=group.layer, module=path.module, rows=rows, width=width, p=p)
    return out


def lora_up(group, h, params):
    """The term h B^T that `linear_forward` adds, one segment for each linear of the group."""
    ranks, h_offs, f_offs = [0] * len(group.columns), [0] * len(group.columns), [0] * len(group.columns)
    for path in group.paths:
        ranks[path.index], h_offs[path.index] = path.rank, path.h
        f_offs[path.index] = path.b.start - group.paths[0].a.start
    return LowRank("nk", h, group.span(params), tuple(ranks), tuple(h_offs), tuple(f_offs))


def lora_back(group, dh, params):
    """The term dh A that `linear_backward` adds (without dropout)."""
    return LowRank("kn", dh, group.span(params), (group.rank,), (0,), (0,))


def lora_backward(plan, work, dh, dy, h, x, group, params, grads, *, rows, width, step=None, p=0.0):
    """dh [rows, rank] = scale dy B; grads: dB += dy^T h, dA += dh^T d(x). dy [rows, fused output], x [rows, width]."""
    terms = {"a_layout": "col", "b_layout": "kn", "accumulate": True, "splits": _splits(rows)}
    if span := _common_span(group):
        _dh_fused(plan, work, dh, dy, group, params, rows, span)
        _dB_fused(plan, work, dy, h, group, grads, rows, terms)
    else:
        _dh_dB_by_path(plan, work, dh, dy, h, group, params, grads, rows, terms)
    columns = group.paths[0].a.stored[1]
    with plan.scope("lora_dA"):
        if p == 0.0:
            _split_matmul(plan, work, group.a_all(grads), dh, x, m=group.rank, n=columns, k=rows, **terms)
            return
        for path in group.paths:
            source = dropped(plan, work, x, group, path, rows=rows, width=width, step=step, p=p)
            _split_matmul(
                plan,
                work,
                grads.view(path.a.start, path.a.stored),
                dh,
                source,
                m=path.rank,
                n=columns,
                k=rows,
                a_off=path.h,
                **terms,
            )
            work.give(source)


def _common_span(group) -> int:
    """Columns of a fused output that one workgroup can reduce for any of its linears: a divisor of all their widths,
    SPLIT_TERMS or a few times that. 0 where their adapters cannot be served by one product."""
    paths = group.paths
    common = gcd(*(p.width for p in paths))
    alike = len(paths) == len(group.columns) and len({p.rank for p in paths}) == 1 and _same_scale(group)
    if not alike or common % SEGMENT_ALIGN:
        return 0
    few = max(SPLIT_TERMS, group.columns[-1] // MAX_SPLITS)
    return next(common // n for n in range(max(1, common // few), 0, -1) if common % (n * DEPTH) == 0)


def _dh_fused(plan, work, dh, dy, group, params, rows, span):
    """dh of all linears of a group in one product over their columns: each split lies within one linear."""
    rank, ends = group.paths[0].rank, tuple(end // span for end in group.columns)
    with plan.scope("lora_dh"):
        parts = work.take((ends[-1], rows, rank), label="split sums")
        matmul(
            plan,
            parts,
            dy,
            group.b_all(params),
            m=rows,
            n=rank,
            k=group.columns[-1],
            b_layout="kn",
            alpha=group.paths[0].scale,
            splits=ends[-1],
        )
        sum_splits(plan, dh, parts, accumulate=False, ends=ends)
        work.give(parts)


def _dB_fused(plan, work, dy, h, group, grads, rows, terms):
    """dB of all linears of a group in one product: the rows of each meet their own columns of h."""
    rank, segments = group.paths[0].rank, Segments(group.columns, (1.0,) * len(group.columns))
    with plan.scope("lora_dB"):
        _split_matmul(
            plan,
            work,
            group.b_all(grads),
            dy,
            h,
            m=group.columns[-1],
            n=rank,
            k=rows,
            shift=rank,
            segments=segments,
            tile="skinny",
            **terms,
        )


def _dh_dB_by_path(plan, work, dh, dy, h, group, params, grads, rows, terms):
    for path in group.paths:
        b_shape = path.b.stored
        with plan.scope("lora_dh"):
            _split_matmul(
                plan,
                work,
                dh,
                dy,
                params.view(path.b.start, b_shape),
                m=rows,
                n=path.rank,
                k=path.width,
                b_layout="kn",
                a_off=path.column,
                o_off=path.h,
                alpha=path.scale,
                splits=_splits(path.width),
            )
        with plan.scope("lora_dB"):
            _split_matmul(
                plan,
                work,
                grads.view(path.b.start, b_shape),
                dy,
                h,
                m=path.width,
                n=path.rank,
                k=rows,
                a_off=path.column,
                b_off=path.h,
                **terms,
            )


def lora_dropout_back(plan, work, dx, dh, group, params, *, rows, width, step, p):
    """dx += mask (dh A) / (1 - p), path by path: with dropout the term cannot ride in the product's epilogue."""
    part = work.take((rows, padded(width)), label="dh A")
    for path in group.paths:
        matmul(
            plan,
            part,
            dh,
            params.view(path.a.start, path.a.stored),
            m=rows,
            n=path.a.stored[1],
            k=path.rank,
            b_layout="kn",
            a_off=path.h,
        )
        dropout_add(plan, dx, part, step, layer=group.layer, module=path.module, rows=rows, width=width, p=p)
    work.give(part)
