"""Products on matrix cores, in their plain expansion: staging, indices, splits, flush and scales, on any device."""

from copy import copy

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor import matmul as cases
from lorawgpu.gpu import KernelCache, Plan
from lorawgpu.gpu.capabilities import Capabilities, MatrixCores
from lorawgpu.ops.matmul import Epilogue, Form, Operand, Problem, cooperative, kernel_for, matmul, tiled
from lorawgpu.ops.stores import BF16, F32, STORES, TERNARY

SMALL = {1: (32, 64, 16, 32), 2: (32, 32, 16, 16), "int8": (32, 64, 16, 32)}  # small tiles compile in less time
M, N, K = 80, 160, 256  # M and N end inside a workgroup's tile


@pytest.fixture(scope="module")
def cores(device):
    """The session's device with matrix cores of tile 16, or `cores(8)`, all in plain WGSL."""

    def with_tile(tile=16, **options):
        other = copy(device)
        other.matrix = MatrixCores(tile, 32, "plain", **options)
        return other

    kernels = KernelCache(device)
    return lambda tile=16, **options: Plan(with_tile(tile, **options), kernels)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(cooperative, "TILES", SMALL)
    monkeypatch.setattr(cooperative, "FLUSH", 64)


def product(plan, store, transposed, *, m=M, splits=1, spread=0.0):
    """The relative error of each row of x W^T (or x W), and the kernels that ran. Rows differ by powers of two."""
    lab, n, k = Lab(plan), N, K
    weight, values = cases.weight_of(plan.device, store, *((k, n) if transposed else (n, k)))
    x = normal(m, k) * np.exp2(spread * (np.arange(m) - m // 2))[:, None].astype(np.float32)
    out, part = lab.output(splits, m, n), weight.parts[0]
    b = Operand(part.tensor, store=part.store)
    operands = Operand(out.exact), Operand(lab.input(x)), b.T if transposed else b
    with lab.section:
        matmul(plan, Problem(m, n, k, *operands, segments=weight.segments, splits=splits))
    lab.run()
    want = x.astype(np.float64) @ (values.T if transposed else values)
    error = np.linalg.norm(out.value.sum(0) - want, axis=1) / np.linalg.norm(want, axis=1)
    return error, [record.label for record in plan.sections["lab"]]


@pytest.mark.parametrize(
    "tile, store, transposed",
    [(16, "ternary", False), (16, "bf16", True), (16, "bf16", False), (16, "q8_0", True), (8, "q8_0", False)],
)
def test_products_are_exact_to_float32(cores, tile, store, transposed):
    error, kernels = product(cores(tile), store, transposed, spread=0.5)
    assert kernels == ["row_up:main", "matmul_cooperative:main"] and error.max() < 6e-7


def test_every_store_of_frozen_weights_is_a_product_on_matrix_cores(cores):
    facts = cores().device.capabilities
    for store in STORES.values():
        want = tiled if store is F32 else cooperative
        assert kernel_for(facts, Form(store, False, False, True)) is want, store.name
    assert kernel_for(facts, Form(BF16, False, True, False)) is tiled
    assert kernel_for(Capabilities(False, 16384, frozenset()), Form(BF16, False, False, True)) is tiled


def test_rows_of_any_magnitude(cores):
    """Gradients are tiny: 2^-60 and 2^60 in one product, each row exact for itself."""
    assert product(cores(), "bf16", True, spread=1.5)[0].max() < 6e-7


def test_fast_rounds_to_f16(cores):
    error, _ = product(cores(fast=True), "q8_0", True)
    assert 5e-5 < error.max() < 5e-4


def test_splits(cores):
    error, kernels = product(cores(), "bf16", False, splits=3)
    assert kernels[-1] == "matmul_cooperative:main" and error.max() < 6e-7


@pytest.mark.parametrize("tile, ranks", [(16, (4, 0, 20)), (8, (0, 12, 0))])
def test_int8_products_have_the_bits_of_the_tiled_kernel(cores, device, tile, ranks, monkeypatch):
    """Adapters, three segments, scales and the residual included."""
    values = []
    for plan in (cores(tile), Plan(device, KernelCache(device))):
        lab = Lab(plan)
        with lab.section:
            results = cases.matmul_epilogue(lab, "int8", 48, 64, *ranks)
        lab.run()
        values.append(results()["y"][0].tobytes())
        assert any("cooperative" in record.label for record in plan.sections["lab"]) == (len(values) == 1)
    assert values[0] == values[1]


def test_the_term_of_adapters_backward(cores):
    """dx = dy W + dh A, for a store that has registers for it."""
    m, k, n, rank = 48, 64, 96, 12
    plan = cores()
    lab, (weight, w) = Lab(plan), cases.weight_of(plan.device, "bf16", n, k)
    dy, dh, a = normal(m, k), normal(m, rank), normal(rank, n)
    out, part = lab.output(m, n), weight.parts[0]
    lora = cases.LowRank(lab.input(dh), lab.input(a), (rank,), (0,), (0,))
    with lab.section:
        operands = Operand(out.tensor), Operand(lab.input(dy)), Operand(part.tensor, store=part.store)
        matmul(plan, Problem(m, n, k, *operands, Epilogue(lora=lora)))
    lab.run()
    np.testing.assert_allclose(out.value, dy.astype(np.float64) @ w + dh.astype(np.float64) @ a, atol=2e-5)


def test_what_is_no_whole_tile_or_adds_to_the_output_is_for_the_tiled_kernel(cores):
    assert product(cores(), "bf16", True, m=40)[1] == ["matmul:main"]
    check(cores(), cases.matmul_epilogue, ("f32", 48, 64, 4, 0, 20))  # accumulates
    assert product(cores(8), "q8_0", False, m=40)[1] == ["row_up:main", "matmul_cooperative:main"]


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.inf])
def test_what_is_not_finite_stays_so(cores, bad):
    plan = cores()
    lab, (weight, _) = Lab(plan), cases.weight_of(plan.device, "bf16", K, N)
    x = normal(32, K)
    x[3, 5] = bad
    out, part = lab.output(32, N), weight.parts[0]
    with lab.section:
        operands = Operand(out.tensor), Operand(lab.input(x)), Operand(part.tensor, store=part.store).T
        matmul(plan, Problem(32, N, K, *operands))
    lab.run()
    finite = np.isfinite(out.value).all(1)
    assert not finite[3] and finite.sum() == 31


def test_a_matrix_is_scaled_into_the_range_of_f16(cores):
    """Weights of 2^-30 are below f16's smallest; their matrix's power of two brings them back."""
    plan = cores()
    lab, w = Lab(plan), normal(N, K) * np.float32(2.0**-30)
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    b, x, out = Operand(lab.input(bits, "bf16"), store=BF16), normal(32, K), lab.output(32, N)
    with lab.section:
        matmul(plan, Problem(32, N, K, Operand(out.tensor), Operand(lab.input(x)), b.T))
    lab.run()
    want = x.astype(np.float64) @ values.T
    assert np.linalg.norm(out.value - want) / np.linalg.norm(want) < 6e-7
    assert cooperative.matrix_up(plan, b) == 2.0 ** (13 - np.floor(np.log2(np.abs(values).max())))


def test_ternary_has_one_part():
    """Its values are exact in f16, and int8 rows too: sums stay below 2^24, as in the tiled kernel's integers."""
    assert (TERNARY.f16_parts, BF16.f16_parts, STORES["q4_k"].f16_parts) == (1, 1, 2)
