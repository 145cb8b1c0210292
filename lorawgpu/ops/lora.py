"""The adapters of a fused projection: y += scale (d(x) A^T) B^T, and their gradients.

The scale is folded into the two skinny products, h = scale d(x) A^T and dh = scale dy B, so that the others use h and
dh as they are: y += h B^T, dB += dy^T h, dA += dh^T d(x), dx += dh A. See docs/DESIGN.md, "Mathematics" and "Linear
layers".
"""

from dataclasses import dataclass

from lorawgpu.gpu.tensor import Tensor, padded
from lorawgpu.ops.dropout import dropout_add, dropout_forward
from lorawgpu.ops.matmul import (
    ROW_ALIGN,
    Epilogue,
    LowRank,
    Operand,
    Problem,
    Segments,
    common_span,
    matmul,
    split_matmul,
    splits_by_length,
    sum_splits,
)


def _same_scale(group) -> bool:
    return len({p.scale for p in group.paths}) == 1


def lora_down(plan, work, h, x, group, params, *, rows, width, step=None, p=0.0, first_row=0):
    """h [rows, rank] = scale d(x) A^T for all paths of `group`: in one product unless dropout or scales differ.

    first_row: for dropout, the token of row 0.
    """
    columns = group.paths[0].a.stored[1]

    def product(source, a, rank, scale, h_off=0):
        out, epilogue = Operand(h, h_off), Epilogue(alpha=scale)
        problem = Problem(rows, rank, columns, out, Operand(source), Operand(a).T, epilogue)
        split_matmul(plan, work, problem, splits_by_length(columns))

    if p == 0.0 and _same_scale(group):
        return product(x, group.a_all(params), group.rank, group.paths[0].scale)
    for path in group.paths:
        source = dropped(plan, work, x, group, path, rows=rows, width=width, step=step, p=p, first_row=first_row)
        product(source, params.view(path.a.start, path.a.stored), path.rank, path.scale, path.h)
        if p:
            work.give(source)


def dropped(plan, work, x, group, path, *, rows, width, step, p, first_row):
    """d(x) of one path: x itself without dropout, otherwise a scratch copy with the path's mask applied."""
    if p == 0.0:
        return x
    out = work.take((rows, padded(width)), label="d(x)")
    options = {"rows": rows, "width": width, "p": p, "first_row": first_row}
    dropout_forward(plan, out, x, step, layer=group.layer, module=path.module, **options)
    return out


def lora_up(group, h, params):
    """The term h B^T that `linear_forward` adds, with one segment per linear layer of the group."""
    ranks, h_offs, f_offs = [0] * len(group.columns), [0] * len(group.columns), [0] * len(group.columns)
    for path in group.paths:
        ranks[path.index], h_offs[path.index] = path.rank, path.h
        f_offs[path.index] = path.b.start - group.paths[0].a.start
    return LowRank(h, group.span(params), tuple(ranks), tuple(h_offs), tuple(f_offs))


def lora_back(group, dh, params):
    """The term dh A that `linear_backward` adds, if there is no dropout."""
    return LowRank(dh, group.span(params), (group.rank,), (0,), (0,))


@dataclass(frozen=True)
class _Sums:
    """Gradients of a group's tensors, as `splits` partial sums over tokens, each laid out as in the flat buffer."""

    out: Tensor  # [splits, elements of the group]; with one split, a view of the flat buffer
    first: int  # the element of the flat buffer with which `out` begins
    splits: int

    @staticmethod
    def take(plan, work, group, grads, rows):
        span = group.span(grads)
        splits = max(1, min(splits_by_length(rows), plan.device.max_binding // span.nbytes))
        out = span if splits == 1 else work.take((splits, span.size), label="split adapter gradients")
        return _Sums(out, group.paths[0].a.start, splits)

    def product(self, plan, start, *, m, n, k, a, b, **options):
        """Record a^T b, split, for the tensor from element `start` on (or for adjacent tensors of width n)."""
        out, epilogue = Operand(self.out, start - self.first, n), Epilogue(accumulate=self.splits == 1)
        slabs = {"splits": self.splits, "slab": self.out.shape[-1]}
        matmul(plan, Problem(m, n, k, out, a.T, b, epilogue, **slabs, **options))

    def give(self, plan, work, group, grads):
        """Add the splits of all tensors to the flat buffer, in order."""
        if self.splits > 1:
            parts, span = self.out, group.span(grads)
            sum_splits(plan, span.view(0, (1, span.size)), parts.view(0, (self.splits, 1, span.size)), accumulate=True)
            work.give(parts)


def lora_backward(plan, work, dh, dy, h, x, group, params, grads, *, rows, width, step=None, p=0.0, first_row=0):
    """dh [rows, rank] = scale dy B; grads: dB += dy^T h, dA += dh^T d(x). dy [rows, fused width], x [rows, width]."""
    sums = _Sums.take(plan, work, group, grads, rows)
    if span := _shared_span(group):
        _dh_fused(plan, work, dh, dy, group, params, rows, span)
        _dB_fused(plan, sums, dy, h, group, rows)
    else:
        _dh_dB_by_path(plan, work, sums, dh, dy, h, group, params, rows)
    with plan.scope("lora_dA"):
        _dA(plan, work, sums, dh, x, group, rows=rows, width=width, step=step, p=p, first_row=first_row)
    with plan.scope("lora_dAB"):
        sums.give(plan, work, group, grads)


def _dA(plan, work, sums, dh, x, group, *, rows, p, **dropout):
    """dA of all paths in one product, or path by path with dropout, because each path has its own mask."""
    start, (_, columns) = group.paths[0].a.start, group.paths[0].a.stored
    if p == 0.0:
        return sums.product(plan, start, m=group.rank, n=columns, k=rows, a=Operand(dh), b=Operand(x))
    for path in group.paths:
        source = dropped(plan, work, x, group, path, rows=rows, p=p, **dropout)
        operands = {"a": Operand(dh, path.h), "b": Operand(source)}
        sums.product(plan, path.a.start, m=path.rank, n=columns, k=rows, **operands)
        work.give(source)


def _shared_span(group) -> int:
    """Terms per split of dh if one product serves all linear layers of a group; 0 if their adapters differ."""
    paths = group.paths
    complete = len(paths) == len(group.columns)
    same = len({path.rank for path in paths}) == 1 and _same_scale(group)
    widths = [path.width for path in paths]
    return common_span(widths) if complete and same and not any(width % ROW_ALIGN for width in widths) else 0


def _dh_fused(plan, work, dh, dy, group, params, rows, span):
    """dh of all linear layers of a group in one product over their columns; each split lies within one layer."""
    rank, ends = group.paths[0].rank, tuple(end // span for end in group.columns)
    with plan.scope("lora_dh"):
        parts = work.take((ends[-1], rows, rank), label="split sums")
        problem = Problem(
            rows,
            rank,
            group.columns[-1],
            out=Operand(parts),
            a=Operand(dy),
            b=Operand(group.b_all(params)),
            epilogue=Epilogue(alpha=group.paths[0].scale),
            splits=ends[-1],
        )
        matmul(plan, problem)
        sum_splits(plan, dh, parts, accumulate=False, ends=ends)
        work.give(parts)


def _dB_fused(plan, sums, dy, h, group, rows):
    """dB of all linear layers of a group in one product: rows of a layer use that layer's columns of h."""
    rank, outputs = group.paths[0].rank, group.columns[-1]
    segments = Segments(group.columns, (1.0,) * len(group.columns))
    sizes = {"m": outputs, "n": rank, "k": rows, "a": Operand(dy), "b": Operand(h)}
    with plan.scope("lora_dB"):
        sums.product(plan, group.paths[0].b.start, **sizes, shift=rank, segments=segments)


def _dh_dB_by_path(plan, work, sums, dh, dy, h, group, params, rows):
    for path in group.paths:
        dys = Operand(dy, path.column)
        with plan.scope("lora_dh"):
            b, epilogue = Operand(params.view(path.b.start, path.b.stored)), Epilogue(alpha=path.scale)
            problem = Problem(rows, path.rank, path.width, Operand(dh, path.h), dys, b, epilogue)
            split_matmul(plan, work, problem, splits_by_length(path.width))
        with plan.scope("lora_dB"):
            sums.product(plan, path.b.start, m=path.width, n=path.rank, k=rows, a=dys, b=Operand(h, path.h))


def lora_dropout_back(plan, work, dx, dh, group, params, *, rows, width, step, p, first_row=0):
    """dx += mask (dh A) / (1 - p), path by path, because with dropout the term does not fit the product's epilogue."""
    part = work.take((rows, padded(width)), label="dh A")
    for path in group.paths:
        a = Operand(params.view(path.a.start, path.a.stored))
        problem = Problem(rows, a.stride, path.rank, Operand(part), Operand(dh, path.h), a, few_terms=True)
        matmul(plan, problem)
        options = {"rows": rows, "width": width, "p": p, "first_row": first_row}
        dropout_add(plan, dx, part, step, layer=group.layer, module=path.module, **options)
    work.give(part)
