"""A frozen weight: y = x W^T and dx = dy W, with the low-rank terms of its adapters (ops/lora.py) in the epilogues."""

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.matmul import SHORT, LowRank, Segments, matmul, sum_splits, workgroups

LEAST_TERMS = 256  # of a reduction, in each of the parts that it is split into
GRAIN = 1 << 18  # elements: parts that hold more are rounded up to it, so that plans of other capacities can use them
SPREAD = 800  # workgroups that a gradient is spread over, by splitting its reduction, when it has few rows


def split_matmul(plan, work, out, a, b, *, m, n, k, o_off=0, accumulate=False, splits=1, **kwargs):
    """A product with a long reduction and a small result: sums of fixed spans, then their sum in order."""
    if splits == 1:
        return matmul(plan, out, a, b, m=m, n=n, k=k, o_off=o_off, accumulate=accumulate, **kwargs)
    size = splits * m * n
    scratch = work.take((padded(size, GRAIN) if size > GRAIN else size,), label="split sums")
    parts = scratch.view(0, (splits, m, n))
    matmul(plan, parts, a, b, m=m, n=n, k=k, splits=splits, **kwargs)
    sum_splits(plan, out, parts, accumulate=accumulate, o_off=o_off)
    work.give(scratch)


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
    """dx [rows, weight.columns] = dy W (+ dh A).

    For ternary weights dh A is a product of its own: in the epilogue it takes registers from a loop that has none to
    spare (the loop ran at 38 for 45 TFLOP/s). Dense ones have them, and there a pass over dx less is worth more.
    """
    apart, lora = (lora, None) if weight.store == "ternary" else (None, lora)
    for i, part in enumerate(weight.parts):
        segments, _ = in_part(part, weight, None)
        terms = part.stop - part.start
        splits = max(1, min(-(-SPREAD // workgroups(rows, weight.columns)), terms // LEAST_TERMS))
        split_matmul(
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
    if apart:
        with plan.scope("lora_back"):
            _add_low_rank(plan, dx, apart, rows=rows, columns=weight.columns)


def _add_low_rank(plan, dx, lora, *, rows, columns):
    """dx += dh A, of a term of kind "kn"."""
    sizes = {"m": rows, "n": columns, "k": lora.ranks[0], "ldb": columns}
    offsets = {"a_off": lora.h_offs[0], "b_off": lora.f_offs[0]}
    matmul(plan, dx, lora.h, lora.factors, b_layout="kn", accumulate=True, tile=SHORT, **sizes, **offsets)
