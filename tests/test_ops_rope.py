"""Rotary embedding into the KV cache and back, against the reference."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.elementwise import rotary
from lorawgpu.ops.rope import Heads, rope_forward, rope_table
from lorawgpu.reference import rope as reference


def test_matches_reference(plan):
    check(
        plan,
        rotary,
        (5, 4, 2, 64, 0, 5),
        (3, 20, 5, 128, 2, 9),  # a longer cache
        (4, 3, 1, 6, -1, 2),  # slots -1 and 2 are out of range: not written, gradient 0
        (4, 3, 1, 6, 4, 7),
        (3, 3, 3, 10, 0, 3, False),
    )


def test_table_is_rounded_once():
    """float64 all the way: a float32 angle at position 100000 would be off by 4e-3."""
    inv_freq = reference.rope_inv_freq(500000.0, 8)
    cos, sin = reference.rope_tables([100000], inv_freq)
    assert np.array_equal(rope_table(inv_freq, 100001)[-1:], np.concatenate([cos, sin], axis=1).astype(np.float32))


def test_parts_that_overlap_are_refused(plan):
    lab = Lab(plan)
    ids, table = lab.input(np.zeros(2, np.int32)), lab.input(rope_table(np.ones(4), 9))
    q, cache, qkv = lab.rows(2, 32), lab.rows(4, 16), lab.input(normal(2, 64))
    heads = Heads(4, 2, 8, 8, k_off=16, v_off=48)
    with lab.section, pytest.raises(ValueError, match="do not hold"):
        rope_forward(plan, q.tensor, cache.tensor, cache.tensor, qkv, ids, ids, table, rows=2, heads=heads)
