"""Flash decoding of single tokens against a float64 softmax over the same cache."""

import pytest
from oplab import check

from lorawgpu.doctor.attention import decode
from lorawgpu.ops.attention_decode import KEYS, SPLITS, fits


@pytest.mark.parametrize(
    "sizes",
    [
        (20, 5, 128, 1, 70),
        (9, 3, 64, 65, 64, 1),
        (8, 1, 8, 5),  # eight query heads share keys in two workgroups
        (4, 4, 80, 100, 3),  # lanes that own nothing
        (2, 1, 256, 33),
        (2, 1, 16, KEYS * SPLITS + 5, 7),  # splits of two blocks
    ],
    ids=str,
)
def test_attention_decode(plan, sizes):
    check(plan, decode, sizes)


def test_which_heads_fit():
    assert fits(64) and fits(80) and fits(256) and not fits(12) and not fits(264)
