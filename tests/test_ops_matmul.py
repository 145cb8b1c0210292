"""The tiled product in every layout and tile: the cases of `lorawgpu doctor` at more sizes, and promises about bits."""

from dataclasses import replace

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor import matmul as cases
from lorawgpu.gpu.capabilities import Capabilities
from lorawgpu.ops.matmul import (
    Epilogue,
    Form,
    LowRank,
    Operand,
    Problem,
    Segments,
    common_span,
    kernel_for,
    matmul,
    splits_to_fill,
)
from lorawgpu.ops.matmul.tiled import BLOCKED_TERMS, MEMORY, TILES, choose_tile, record
from lorawgpu.ops.matmul.tuning import AMD, APPLE, INTEL, LARGE, NVIDIA, TABLE, tuning_of
from lorawgpu.ops.stores import BF16, F32, TERNARY

WHOLE = 16 * 32  # terms; whole tiles of every kind


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("a_layout", ["row", "col"])
@pytest.mark.parametrize("b_layout", ["nk", "kn"])
@pytest.mark.parametrize("k", [84, WHOLE])
def test_layouts(plan, tile, a_layout, b_layout, k):
    check(plan, cases.matmul_tiles, (tile, a_layout, b_layout, 131, 208, k))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [16, 80, 2576, 4 * WHOLE])
def test_int8_product_is_an_integer_product(plan, tile, k):
    check(plan, cases.matmul_int8, (tile, 67, 112, k), tolerance=0.0)


@pytest.mark.parametrize("arith", ["f32", "int8"])
@pytest.mark.parametrize("ranks", [(4, 0, 20), (0, 12, 0)])
def test_epilogue_adds_lora_segments_residual_and_itself(plan, arith, ranks):
    check(plan, cases.matmul_epilogue, (arith, 37, 64, *ranks))


def test_backward_epilogue(plan):
    check(plan, cases.matmul_backward, (20, 96, 48, 12))


def test_splits_offsets_and_alpha(plan):
    check(plan, cases.matmul_splits, (3, 24, 32, 1000))


def products(plan, m, k, n, tiles, a_layout="row", b_layout="nk"):
    """The same product once for each tile (None: as chosen by its shape) of `tiles`, or for each (rows, tile)."""
    lab, a, b, outs = Lab(plan), normal(m, k), normal(n, k), []
    left = Operand(lab.input(a)) if a_layout == "row" else Operand(lab.input(np.pad(a.T, ((0, 0), (0, -m % 16))))).T
    right = Operand(lab.input(b)).T if b_layout == "nk" else Operand(lab.input(b.T))
    with lab.section:
        for rows, tile in tiles:
            outs.append(lab.output(rows, n))
            record(plan, Problem(rows, n, k, Operand(outs[-1].tensor), left, right), tile)
    lab.run()
    return [out.value for out in outs]


@pytest.mark.parametrize("a_layout, b_layout", [("row", "nk"), ("row", "kn"), ("col", "kn")])
@pytest.mark.parametrize("k", [300, WHOLE])
def test_the_bits_of_a_sum_do_not_depend_on_the_tile(plan, a_layout, b_layout, k):
    assert k > BLOCKED_TERMS
    first, *others = products(plan, 67, k, 112, [(67, tile) for tile in TILES], a_layout, b_layout)
    assert all(np.array_equal(other, first) for other in others)


def test_rows_do_not_depend_on_their_number_or_the_tile(plan):
    """A token's bits are the same alone and in a batch of any size."""
    *some, tall = products(plan, 200, 336, 144, [(1, None), (40, None), (200, None), (200, "tall")])
    assert all(np.array_equal(rows, tall[: len(rows)]) for rows in some)


def square(lab, **options):
    """A problem of 16 x 16 matrices."""
    x = Operand(lab.input(normal(16, 16)))
    return Problem(**{"m": 16, "n": 16, "k": 16, "out": Operand(lab.output(16, 16).exact), "a": x, "b": x.T} | options)


def test_bad_shapes_are_named(plan):
    lab = Lab(plan)
    for wrong in ({"k": 6}, {"n": 15}, {"out": Operand(lab.output(16, 16).exact, offset=2)}):
        with pytest.raises(ValueError, match="multiples of 4"):
            square(lab, **wrong)
    with pytest.raises(ValueError, match="3 splits want as many slabs of 256 elements, got 256"):
        square(lab, splits=3)


@pytest.mark.parametrize("what", ["qscale", "a residual", "adapters with W.T", "accumulate"])
def test_splits_refuse_what_they_would_do_more_than_once(plan, what):
    lab = Lab(plan)
    x = lab.input(normal(16, 16))
    options = {
        "qscale": {"qscale": x},
        "a residual": {"epilogue": Epilogue(residual=x)},
        "adapters with W.T": {"epilogue": Epilogue(lora=LowRank(x, x, (4,), (0,), (0,)))},
        "accumulate": {"epilogue": Epilogue(accumulate=True)},
    }[what]
    with pytest.raises(ValueError, match=f"2 splits cannot have {what}"):
        square(lab, splits=2, **options)


def test_segments_that_would_share_a_tile_are_refused(plan):
    lab, segments = Lab(plan), Segments((8, 16), (1.0, 2.0))
    scaled = Operand(lab.input(np.zeros((4, 4), np.uint32)), store=TERNARY)
    with lab.section:
        for options, align in (({"b": scaled}, 16), ({"shift": 4}, 64)):
            with pytest.raises(ValueError, match=f"segments must end at multiples of {align}"):
                matmul(plan, square(lab, segments=segments, **options))
        matmul(plan, square(lab, segments=segments, b=scaled.T))  # segments of columns may end anywhere


def test_a_product_that_no_kernel_computes_is_refused(plan):
    lab = Lab(plan)
    with lab.section, pytest.raises(ValueError, match="no kernel supports .*'bf16'"):
        dense = Operand(lab.input(np.zeros((16, 16), np.uint16), "bf16"), store=BF16).T
        matmul(plan, square(lab, b=dense, qscale=lab.input(np.zeros((16, 2), np.uint32))))
    able = plan.device.capabilities
    form = Form(F32, int8=False, a_transposed=False, b_transposed=True)
    assert kernel_for(able, form) is kernel_for(able, replace(form, store=TERNARY, int8=True))
    with pytest.raises(ValueError, match="workgroup_memory=16383"):
        kernel_for(Capabilities(software=False, workgroup_memory=MEMORY - 1, features=frozenset()), form)


@pytest.mark.parametrize(("widths", "span"), [([256], 256), ([384, 384], 384), ([4096, 1024, 1024], 256), ([64], 64)])
def test_spans_that_cross_no_border(widths, span):
    assert common_span(widths) == span


@pytest.mark.parametrize(
    ("m", "n", "terms", "room", "want"),
    [
        (832, 1024, 151936, 0, 4),  # 208 workgroups: enough splits for 800
        (832, 1024, 151936, 14 * 832 * 1024, 14),  # as many as there is scratch for
        (832, 1024, 151936, 1 << 30, 29),  # at most 6,144 workgroups
        (4096, 1024, 6144, 1 << 30, 3),  # of 2,048 terms or more
        (4096, 6144, 1024, 1 << 30, 1),
        (64, 64, 300, 1 << 30, 1),
    ],
)
def test_how_often_a_gradient_is_cut(m, n, terms, room, want):
    assert splits_to_fill(LARGE, m, n, terms, room) == want


def test_spans_of_odd_widths_are_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        common_span([64, 24])


def device_like(kind, vendor=0, lanes=32, memory=16384):
    return Capabilities(kind == "CPU", memory, frozenset(), kind, vendor, lanes)


@pytest.mark.parametrize(("device", "busy"), [
    (device_like("DiscreteGPU", NVIDIA), 400), (device_like("DiscreteGPU", AMD, 64), 400), (device_like("CPU"), 400),
    (device_like("Unknown"), 400), (device_like("IntegratedGPU", INTEL, 0), 120),
    (device_like("IntegratedGPU", APPLE), 120),
])  # fmt: skip
def test_a_tuning_follows_from_what_a_device_says_of_itself(device, busy):
    assert tuning_of(device).busy == busy and tuning_of(device) == tuning_of(replace(device, features=frozenset("x")))


def test_every_device_has_a_tuning_and_every_line_a_reason():
    assert all(line.why for line in TABLE)
    last = TABLE[-1]
    assert (last.kind, last.vendor, last.lanes, last.memory) == (None, None, None, 0) and last.tuning == LARGE


def test_a_smaller_gpu_is_kept_busy_by_fewer_workgroups(device):
    out = Operand(device.tensor((1024, 1024)))
    problem = Problem(1024, 1024, 64, out, Operand(device.tensor((1024, 64))), Operand(device.tensor((1024, 64))).T)
    few, many = (choose_tile(problem, device_like(kind)) for kind in ("IntegratedGPU", "DiscreteGPU"))
    assert (few, many) == ("medium", "small")  # 256 workgroups
    assert splits_to_fill(tuning_of(device_like("IntegratedGPU")), 64, 576, 49152) == 27
