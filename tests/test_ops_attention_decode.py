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


OPTIONS = {
    "prepared": ((4, 2, 16, 1, 70, 64), {"is_fused": False}),
    "prepared, one head each": ((3, 3, 80, 9, 130), {"is_fused": False}),
    "HD 512": ((8, 1, 512, 3, 70), {}),
    "HD 512, prepared": ((8, 1, 512, 66, 65, 64, 1), {"is_fused": False, "window": 65}),
    "HD 264": ((1, 1, 264, 9), {}),
    "window": ((4, 2, 16, 1, 19, 20, 21, 22, 200), {"window": 20}),
    "window of one key": ((4, 2, 16, 1, 2, 70), {"window": 1}),
    "window of two blocks": ((4, 2, 16, 129, 128, 127, 500), {"window": 128}),
    "window beyond all": ((4, 2, 16, 33), {"window": 1000}),
    "window and soft cap, prepared": ((4, 2, 16, 100, 3), {"window": 70, "softcap": 0.5, "is_fused": False}),
    "saturated": ((4, 2, 16, 100, 3), {"softcap": 0.05}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(plan, name):
    sizes, options = OPTIONS[name]
    check(plan, decode, sizes, **options)


def test_which_heads_fit():
    assert fits(64) and fits(80) and fits(256) and fits(512) and not fits(12) and not fits(520)


@pytest.mark.parametrize(
    ("options", "message"), [({"window": 0}, "window is 0"), ({"softcap": 0.0}, "softcap is 0.0")], ids=str
)
def test_an_option_that_makes_no_sense_is_named(plan, options, message):
    with pytest.raises(ValueError, match=message):
        check(plan, decode, (4, 2, 16, 5), **options)
