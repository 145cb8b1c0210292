"""Long sums in parts: how many of them, the product that makes them, and their sum in order."""

from dataclasses import replace
from math import gcd

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.matmul.choose import matmul
from lorawgpu.ops.matmul.problem import SPAN_ALIGN, Operand
from lorawgpu.ops.matmul.tiled import workgroups

SPREAD = 800  # workgroups that a gradient of few rows is spread over
LEAST_TERMS = 256  # of a part, when it is
GRAIN = 1 << 18  # elements: parts that hold more are rounded up to it, so that plans of other capacities can use them
# A long sum of few results is taken in parts by its length alone, so that a forward has the same bits in every batch:
SPLIT_TERMS = 256  # terms of a part,
FEW_SPLITS = 4  # or half as many where that makes fewer parts than this,
MAX_SPLITS = 32  # and more where it makes more than this.


def splits_by_length(terms: int) -> int:
    """Parts of a sum of so many terms with few results, as a low-rank product has them."""
    return max(1, min(FEW_SPLITS, terms * 2 // SPLIT_TERMS), min(MAX_SPLITS, terms // SPLIT_TERMS))


def splits_to_fill(m: int, n: int, terms: int) -> int:
    """Parts that keep a large GPU busy with a product (m, n) of few rows. They depend on m: for gradients only."""
    return max(1, min(-(-SPREAD // workgroups(m, n)), terms // LEAST_TERMS))


def common_span(widths: list[int]) -> int:
    """Terms of a part when every sum over [widths[0] | widths[1] | ..] falls into parts that cross no border.

    A divisor of all widths: SPLIT_TERMS, or a few times that. ValueError when a width is not a multiple of SPAN_ALIGN.
    """
    if (common := gcd(*widths)) % SPAN_ALIGN:
        raise ValueError(f"widths {widths} are not all multiples of {SPAN_ALIGN}")
    few = max(SPLIT_TERMS, sum(widths) // MAX_SPLITS)
    return next(common // n for n in range(max(1, common // few), 0, -1) if common % (n * SPAN_ALIGN) == 0)


def split_matmul(plan, work, problem, splits: int):
    """Record `problem` as sums of fixed spans of its terms, then their sum in order."""
    if splits == 1:
        return matmul(plan, problem)
    size = splits * problem.m * problem.n
    scratch = work.take((padded(size, GRAIN) if size > GRAIN else size,), label="split sums")
    parts = scratch.view(0, (splits, problem.m, problem.n))
    partial = replace(problem.epilogue, accumulate=False)
    matmul(plan, replace(problem, out=Operand(parts), epilogue=partial, splits=splits))
    out = problem.out
    sum_splits(plan, out.tensor, parts, accumulate=problem.epilogue.accumulate, o_off=out.offset)
    work.give(scratch)


def sum_splits(plan, out, parts, *, accumulate, o_off=0, ends=None):
    """out[:, o_off : o_off + n] (+)= the sum of parts [splits, m, n] over splits, in order.

    With `ends` (at most three, the last one splits) the splits fall into groups, and each group's sum goes n columns
    further right.
    """
    splits, m, n = parts.shape
    ends = ends or (splits,)
    columns = len(ends) * n // 4
    groups = -(-m * columns // 64)
    x = min(groups, 32768)
    params = {
        "count4": m * columns,
        "slab4": m * n // 4,
        "n4": n // 4,
        "columns4": columns,
        "ldo4": out.shape[-1] // 4,
        "o_off4": o_off // 4,
        "stride": x * 64,
        **{f"end{i}": (*ends, splits, splits)[i] for i in range(3)},
    }
    grid = (x, -(-groups // x))
    plan.record("sum_splits", "main", grid, overrides={"ACCUMULATE": accumulate}, params=params, parts=parts, out=out)
