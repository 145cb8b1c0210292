"""Matrix-vector products of a few rows, and their inputs, against NumPy float64."""

import numpy as np
import pytest
from oplab import Lab, check, limited, normal

from lorawgpu.doctor import matmul as cases
from lorawgpu.ops import matvec
from lorawgpu.ops.gate import ACTIVATIONS
from lorawgpu.ops.matvec import MAX_ROWS, MatvecInput, lanes_for, matvec_forward, matvec_input, pieces_of, unroll_of
from lorawgpu.ops.stores import STORES


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("rows", "columns", "out"), [(1, 48, 123), (3, 576, 64), (MAX_ROWS, 1536, 37), (16, 64, 24)])
def test_products(plan, store, rows, columns, out):
    check(plan, cases.matvec, (store, rows, columns, out))


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS, 3 * MAX_ROWS])
@pytest.mark.parametrize("columns", [16, 528, 2560])
@pytest.mark.parametrize("binding", [None, 4096])
def test_ternary_with_adapters_in_parts(plan, monkeypatch, rows, columns, binding):
    """Three segments with their own scales and adapters (the second has none), in one part and cut into parts."""
    whole = cases.weight_of
    if binding:
        monkeypatch.setattr(cases, "weight_of", lambda device, *sizes: whole(limited(device, binding), *sizes))
    check(plan, cases.matvec_adapters, ("ternary", rows, columns, 4, 0, 8))


@pytest.mark.parametrize("store", ["bf16", "q4_k", "ternary"])
@pytest.mark.parametrize("many", [matvec.MANY_LANES, 0])
def test_adapters_are_added_before_the_sum_or_after_it(plan, monkeypatch, store, many):
    """After it where workgroups are many; ranks of less and more than the four vec4s that are read together."""
    monkeypatch.setattr(matvec, "MANY_LANES", many)
    check(plan, cases.matvec_adapters, *((store, rows, 512, 4, 20, 40) for rows in (1, 3, 16)))


def test_a_row_is_cut_into_pieces_unless_its_parts_need_each_other():
    def pieces(kind, width, normed=False, int8=False):
        return pieces_of(MatvecInput(kind, None), width, normed, int8)

    assert [pieces("gate", width) for width in (1000, 1040, 4096, 14336, 65536)] == [1, 2, 4, 7, 8]
    assert pieces("attention", 4096) == 4
    assert {pieces("rows", 4096), pieces("gate", 4096, normed=True), pieces("attention", 4096, int8=True)} == {1}


@pytest.mark.parametrize("store", ["bf16", "q4_k"])
def test_a_row_has_the_same_bits_alone(plan, store):
    lab, x, found = Lab(plan), normal(24, 512), {}
    weight, _ = cases.weight_of(plan.device, store, 512, 80)
    words = cases.digits_of(x) if store == "q4_k" else x
    with lab.section:
        for rows in (1, 5, 8, 24):
            found[rows] = lab.rows(rows, 80)
            matvec_forward(plan, found[rows].tensor, lab.input(words[:rows]), weight, rows=rows)
    lab.run()
    for rows, out in found.items():
        np.testing.assert_array_equal(out.value, found[24].value[:rows])


def test_too_many_rows_are_refused(plan):
    lab = Lab(plan)
    weight, _ = cases.weight_of(plan.device, "f32", 16, 16)
    with lab.section, pytest.raises(ValueError, match="9 rows, want 1 to 8"):
        matvec_forward(plan, lab.rows(9, 16).tensor, lab.padded(normal(9, 16)), weight, rows=MAX_ROWS + 1)


@pytest.mark.parametrize(
    ("terms", "quads", "lanes"), [(4, 4, 32), (160, 960, 32), (432, 640, 64), (5000, 640, 128), (640, 32064, 32)]
)
def test_how_many_lanes_share_a_sum(terms, quads, lanes):
    assert lanes_for(terms, quads) == lanes


def test_steps_are_unrolled_evenly():
    assert [unroll_of(steps, 4) for steps in (1, 4, 5, 9, 20)] == [1, 4, 3, 3, 4]


@pytest.mark.parametrize("kind", ["rows", *ACTIVATIONS, "attention"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("arith", ["f32", "int8", "digits"])
def test_input(plan, kind, normed, arith):
    check(plan, cases.matvec_source, (kind, arith, 3, 1096, normed), tolerance=1e-5)  # sums of 1096 terms, and exp


@pytest.mark.parametrize("layout", ["stacked", "packed", "separate"])
@pytest.mark.parametrize("arith", ["f32", "int8", "digits"])
def test_layouts_and_scale_of_the_gate(plan, layout, arith):
    """Packed widths: u begins at a multiple of 16, of 4, and of neither."""
    sizes = [("gelu_tanh", arith, 2, width, True, layout, 0.22) for width in (48, 84, 42, 1095)]
    check(plan, cases.matvec_source, *sizes, tolerance=1e-5)


def test_a_non_finite_input_marks_the_step(plan):
    lab, x = Lab(plan), normal(2, 64)
    x[1, 5] = np.nan
    state = lab.output(16, initial=[0, 0xFFFFFFFF] + [0] * 14, dtype="u32")
    out, qscale = lab.output(2, 16, dtype="u32"), lab.output(2, 2, dtype="u32")
    with lab.section:
        matvec_input(
            plan,
            out.tensor,
            MatvecInput("rows", lab.padded(x)),
            state.tensor,
            rows=2,
            width=64,
            eps=1e-5,
            record_id=7,
            qscale=qscale.tensor,
        )
    lab.run()
    assert state.value[0] == 1 and state.value[1] == 7
