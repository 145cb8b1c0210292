"""The adapters of a fused projection: y += scale (d(x) A^T) B^T, and their gradients (DESIGN section 1).

The adapter's scale is folded into both skinny products (h = scale d(x) A^T and dh = scale dy B), so everything that
follows uses h and dh as they are: y += h B^T, dB += dy^T h, dA += dh^T d(x), dx += dh A.
"""

from dataclasses import dataclass
from math import gcd

from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.dropout import dropout_add, dropout_forward
from lorawgpu.ops.linear import split_matmul
from lorawgpu.ops.matmul import DEPTH, SHORT, LowRank, Segments, matmul, sum_splits

# A long reduction is summed in parts, by its length alone, so that a forward has the same bits in every batch:
SPLIT_TERMS = 256  # terms of a part,
FEW_SPLITS = 4  # or half as many where that makes fewer parts than this,
MAX_SPLITS = 32  # and more where it makes more than this.
SEGMENT_ALIGN = 64  # rows of a skinny tile: a tile must not straddle two linears


def _splits(terms: int) -> int:
    return max(1, min(FEW_SPLITS, terms * 2 // SPLIT_TERMS), min(MAX_SPLITS, terms // SPLIT_TERMS))


def _same_scale(group) -> bool:
    return len({p.scale for p in group.paths}) == 1


def lora_down(plan, work, h, x, group, params, *, rows, width, step=None, p=0.0):
    """h [rows, rank] = scale d(x) A^T for all paths of `group` at once, path by path where dropout differs."""
    columns = group.paths[0].a.stored[1]
    if p == 0.0 and _same_scale(group):
        return split_matmul(
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
        split_matmul(
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


@dataclass(frozen=True)
class _Sums:
    """Gradients of a group's tensors, sums over tokens: `splits` parts of each, laid out as in the flat buffer."""

    out: Tensor  # [splits, the group's elements]; without splits the flat buffer's own
    first: int  # element of the flat buffer that `out` begins with
    splits: int

    @staticmethod
    def take(plan, work, group, grads, rows):
        span = group.span(grads)
        splits = max(1, min(_splits(rows), plan.device.max_binding // span.nbytes))
        out = span if splits == 1 else work.take((splits, span.size), label="adapter gradients in parts")
        return _Sums(out, group.paths[0].a.start, splits)

    def product(self, plan, a, b, start, *, n, **kwargs):
        """The part of each split of a^T b, for the tensor (or neighbours of one width n) from element `start` on."""
        slab = self.out.shape[-1]
        layout = {"a_layout": "col", "b_layout": "kn", "o_off": start - self.first, "ldo": n, "slab": slab}
        matmul(plan, self.out, a, b, n=n, splits=self.splits, accumulate=self.splits == 1, **layout, **kwargs)

    def give(self, plan, work, group, grads):
        """Add the parts to the flat buffer, in order and all tensors at once."""
        if self.splits > 1:
            parts, span = self.out, group.span(grads)
            sum_splits(plan, span.view(0, (1, span.size)), parts.view(0, (self.splits, 1, span.size)), accumulate=True)
            work.give(parts)


def lora_backward(plan, work, dh, dy, h, x, group, params, grads, *, rows, width, step=None, p=0.0):
    """dh [rows, rank] = scale dy B; grads: dB += dy^T h, dA += dh^T d(x). dy [rows, fused output], x [rows, width]."""
    sums = _Sums.take(plan, work, group, grads, rows)
    if span := _common_span(group):
        _dh_fused(plan, work, dh, dy, group, params, rows, span)
        _dB_fused(plan, sums, dy, h, group, rows)
    else:
        _dh_dB_by_path(plan, work, sums, dh, dy, h, group, params, rows)
    with plan.scope("lora_dA"):
        _dA(plan, work, sums, dh, x, group, rows=rows, width=width, step=step, p=p)
    with plan.scope("lora_dAB"):
        sums.give(plan, work, group, grads)


def _dA(plan, work, sums, dh, x, group, *, rows, width, step, p):
    """dA of all paths at once; path by path where each has its own dropout."""
    start, (_, columns) = group.paths[0].a.start, group.paths[0].a.stored
    if p == 0.0:
        return sums.product(plan, dh, x, start, m=group.rank, n=columns, k=rows)
    for path in group.paths:
        source = dropped(plan, work, x, group, path, rows=rows, width=width, step=step, p=p)
        sums.product(plan, dh, source, path.a.start, m=path.rank, n=columns, k=rows, a_off=path.h)
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


def _dB_fused(plan, sums, dy, h, group, rows):
    """dB of all linears of a group in one product: the rows of each meet their own columns of h."""
    rank, outputs = group.paths[0].rank, group.columns[-1]
    sizes = {"m": outputs, "n": rank, "k": rows, "tile": "skinny"}
    segments = Segments(group.columns, (1.0,) * len(group.columns))
    with plan.scope("lora_dB"):
        sums.product(plan, dy, h, group.paths[0].b.start, **sizes, shift=rank, segments=segments)


def _dh_dB_by_path(plan, work, sums, dh, dy, h, group, params, rows):
    for path in group.paths:
        with plan.scope("lora_dh"):
            split_matmul(
                plan,
                work,
                dh,
                dy,
                params.view(path.b.start, path.b.stored),
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
            sizes = {"m": path.width, "n": path.rank, "k": rows}
            sums.product(plan, dy, h, path.b.start, **sizes, a_off=path.column, b_off=path.h)


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
            tile=SHORT,
        )
        dropout_add(plan, dx, part, step, layer=group.layer, module=path.module, rows=rows, width=width, p=p)
    work.give(part)
