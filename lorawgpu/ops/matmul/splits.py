"""Split sums: how many splits, the product that computes them, and their sum in order."""

from dataclasses import replace
from math import gcd

from lorawgpu.gpu.tensor import padded
from lorawgpu.ops.matmul.choose import matmul
from lorawgpu.ops.matmul.problem import SPAN_ALIGN, Operand
from lorawgpu.ops.matmul.tiled import workgroups
from lorawgpu.ops.matmul.tuning import Tuning

MIN_SPLIT_TERMS = 256  # fewest terms per split when a gradient is spread
# A long gradient is cut further: its workgroups all take the same time, so the last wave should be a small share of it
# (`Tuning.waves`).
LONG_TERMS = 2048  # fewest terms per split then, because the splits' sums are written and read
GRAIN = 1 << 18  # elements; larger scratch is rounded up to a multiple, so that plans of other capacities can reuse it
# A product with few results splits by the number of terms only, so that a forward has the same bits in every batch.
SPLIT_TERMS = 256  # terms per split
FEW_SPLITS = 4  # with fewer splits than this, they are half as long
MAX_SPLITS = 32  # with more splits than this, they are longer


def splits_by_length(terms: int) -> int:
    """Number of splits for sums of `terms` terms with few results, as in a low-rank product."""
    return max(1, min(FEW_SPLITS, terms * 2 // SPLIT_TERMS), min(MAX_SPLITS, terms // SPLIT_TERMS))


def splits_to_fill(tuning: Tuning, m: int, n: int, terms: int, room: int = 0) -> int:
    """Number of splits that keep a device busy with a product (m, n), to its end.

    For gradients only, because it depends on m. `room`: elements of scratch that a plan has anyway; with more of them,
    a long sum is cut further.
    """
    own = workgroups(m, n)
    few = min(-(-tuning.spread // own), terms // MIN_SPLIT_TERMS)
    return max(1, few, min(tuning.waves // own, terms // LONG_TERMS, room // (m * n)))


def common_span(widths: list[int]) -> int:
    """Terms per split for a sum over [widths[0] | widths[1] | ..] in which no split crosses a border.

    A divisor of all widths: SPLIT_TERMS, or a few times that. ValueError if a width is not a multiple of SPAN_ALIGN.
    """
    if (common := gcd(*widths)) % SPAN_ALIGN:
        raise ValueError(f"widths {widths} are not all multiples of {SPAN_ALIGN}")
    few = max(SPLIT_TERMS, sum(widths) // MAX_SPLITS)
    return next(common // n for n in range(max(1, common // few), 0, -1) if common % (n * SPAN_ALIGN) == 0)


def split_matmul(plan, work, problem, splits: int):
    """Record `problem` as `splits` sums over fixed spans of its terms, then their sum in order."""
    if splits == 1:
        return matmul(plan, problem)
    size = splits * problem.m * problem.n
    with work.reuse_only():
        scratch = work.take((padded(size, GRAIN) if size > GRAIN else size,), label="split sums")
    parts = scratch.view(0, (splits, problem.m, problem.n))
    partial = replace(problem.epilogue, accumulate=False)
    matmul(plan, replace(problem, out=Operand(parts), epilogue=partial, splits=splits))
    out = problem.out
    sum_splits(plan, out.tensor, parts, accumulate=problem.epilogue.accumulate, o_off=out.offset)
    work.give(scratch)


def sum_splits(plan, out, parts, *, accumulate, o_off=0, ends=None):
    """out[:, o_off : o_off + n] (+)= the sum of parts [splits, m, n] over splits, in order.

    `ends` (at most three, the last equal to splits) cuts the splits into groups: group g is summed into the columns
    from o_off + g n on.
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
