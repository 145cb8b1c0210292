"""Gather and scatter: exact, in chunks, ignoring rows without a target."""

from oplab import check

from lorawgpu.doctor.elementwise import gather


def test_is_exact(plan):
    check(plan, gather, (9, 123, 2), (9, 123, 5), (4, 2560, 2), (3, 1, 3), (1, 16, 1))
