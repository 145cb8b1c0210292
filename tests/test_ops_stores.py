"""Every store in every product that reads it, alone and fused with another store: exactly the stored values."""

from dataclasses import replace

import numpy as np
import pytest
from oplab import Lab, check

from lorawgpu.doctor import matmul as cases
from lorawgpu.doctor.lab import NanScratch
from lorawgpu.ops.embedding import embedding_forward
from lorawgpu.ops.linear import linear_backward, linear_forward
from lorawgpu.ops.matvec import input_kind, matvec_forward
from lorawgpu.ops.stores import AFFINE, STORES, TERNARY

SIZES = [(35, 96, 48, 16, 64), (3, 512, 300)]  # rows, columns and rows of each stacked matrix
# Quick tests try them with unit rows.
RARE = ("q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "iq4_nl", "iq4_xs", *(s.name for s in AFFINE if s.name != "affine4_64"))
LONG = ("affine4_32", "affine4_128", "affine8_32", "affine8_128")  # which differ from others in their strides alone
MIXED = ["bf16 f32", "f16 f32 bf16", "q4_k q6_k", "q5_0 f32 q8_0"]


@pytest.mark.parametrize("product", [cases.forward, cases.transposed, cases.matvec])
@pytest.mark.parametrize(
    "stores", [pytest.param(name, marks=pytest.mark.long) if name in RARE else name for name in (*STORES, *MIXED)]
)
def test_products(plan, product, stores):
    for rows, *sizes in SIZES:
        check(plan, product, (stores, min(rows, 8) if product is cases.matvec else rows, *sizes))


@pytest.mark.parametrize("name", STORES)
def test_embedding(plan, name):
    """Exact in one part and in several; the values include f16 subnormals."""
    if STORES[name].lookup:
        for columns, *widths in ((123, 7), (2560, 5, 1, 17), (1, 2, 3)):
            check(plan, cases.embedding, (name, columns, *widths), tolerance=0.0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in STORES]
)
def test_products_with_unit_rows_are_the_stored_values(plan, name):
    """Bit by bit, in both orientations and for single rows; the values include subnormal f16 scales."""
    lab = Lab(plan)
    weight, values = cases.weight_of(lab.device, name, 256, 19, 45)
    if weight.int8_input:
        return  # tests/test_ops_matmul.py
    rows, columns = np.eye(weight.rows, dtype=np.float32), np.eye(weight.columns, dtype=np.float32)
    y, dx, few = lab.output(256, weight.rows), lab.output(weight.rows, 256), lab.output(8, weight.rows)
    picked = columns[31::31]
    with lab.section:
        linear_forward(plan, y.tensor, lab.input(columns), weight, rows=256)
        linear_backward(plan, NanScratch(lab.device), dx.tensor, lab.input(rows), weight, rows=weight.rows)
        few_rows = cases.digits_of(picked) if input_kind(weight) == "digits" else picked
        matvec_forward(plan, few.tensor, lab.input(few_rows), weight, rows=8)
    lab.run()
    for got, want in ((y, values.T), (dx, values), (few, picked @ values.T)):
        assert np.array_equal(got.value, want)


def test_every_store_is_tried():
    assert cases.MATRICES.keys() == STORES.keys()


def test_a_ternary_table_has_no_rows_to_look_up(plan):
    lab = Lab(plan)
    weight, _ = cases.weight_of(lab.device, "ternary", 16, 16)
    ids, x = lab.input(np.zeros(1, np.int32)), lab.rows(1, 16)
    with lab.section, pytest.raises(ValueError, match="rows of a ternary table cannot be looked up"):
        embedding_forward(plan, x.tensor, ids, weight.parts, rows=1, width=16, vocab=16)


def test_tokens_without_a_row_in_the_table_are_noticed(plan):
    """Also where the table is cut into parts, and where it is padded with rows that no token has."""
    lab = Lab(plan)
    weight, values = cases.weight_of(lab.device, "f32", 16, 16)
    parts = [*weight.parts, *(replace(p, start=16 + p.start, stop=16 + p.stop) for p in weight.parts)]
    ids, x = lab.input(np.array([20, 24, 3, 2**31 - 1, -1], np.int32)), lab.rows(5, 16)
    with lab.section:
        embedding_forward(plan, x.tensor, ids, parts, rows=5, width=16, vocab=24)
    lab.run()
    np.testing.assert_array_equal(x.value[[0, 2]], values[[4, 3]])
    assert np.isnan(x.value[[1, 3, 4]]).all()


@pytest.mark.parametrize("name", STORES)
def test_shapes_are_of_whole_blocks(name):
    store = STORES[name]
    lines, elements = store.shape(48, 512)
    assert lines * store.rows == 48 and store.columns(elements) == 512


def test_a_matrix_of_broken_blocks_is_refused():
    with pytest.raises(ValueError, match="blocks of 4 x 4 weights; a matrix of 6 x 16"):
        TERNARY.shape(6, 16)


def test_stores_that_read_different_rows_are_not_fused(plan):
    with pytest.raises(ValueError, match=r"f32, ternary cannot be fused"):
        cases.weight_of(plan.device, "ternary f32", 16, 16, 16)
