"""The tiled product in every layout, store and tile, against float64."""

import numpy as np
import pytest
from gradcheck import relative_error
from oplab import Lab, normal, pad

from lorawgpu.gpu import padded
from lorawgpu.ops.matmul import BLOCKED_TERMS, TILES, LowRank, Segments, matmul, sum_splits
from lorawgpu.reference.quantize import quantize_forward
from lorawgpu.weights.device import pack_blocks

WHOLE = 16 * 32  # terms that are whole tiles of every kind
FLOAT32 = 2e-6  # float32 sums of a few hundred terms err by sqrt(k) x 6e-8; a lost term is off by 1e-2


def bf16(x):
    return ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def widen_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("a_layout", ["row", "col"])
@pytest.mark.parametrize("b_layout", ["nk", "kn"])
@pytest.mark.parametrize("k", [84, WHOLE])
def test_layouts(plan, tile, a_layout, b_layout, k):
    m, n = 131, 208
    lab = Lab(plan)
    a, b = normal(m, k), normal(n, k)
    stored_a = pad(a.T)[:, : padded(m)] if a_layout == "col" else a
    out = lab.output(m, n)
    with lab.section:
        matmul(
            plan,
            out.tensor,
            lab.input(stored_a),
            lab.input(b if b_layout == "nk" else b.T),
            m=m,
            n=n,
            k=k,
            a_layout=a_layout,
            b_layout=b_layout,
            tile=tile,
        )
    lab.run()
    assert relative_error(out.value, a.astype(np.float64) @ b.T) < FLOAT32


@pytest.mark.parametrize("store", ["f32", "bf16", "f16", "ternary"])
@pytest.mark.parametrize("b_layout", ["nk", "kn"])
@pytest.mark.parametrize("k, n", [(96, 48), (WHOLE, WHOLE)])
def test_stores_are_read_exactly(plan, store, b_layout, k, n):
    m = 35
    lab, w = Lab(plan), normal(n, k)
    codes = np.random.default_rng(3).integers(0, 3, (n, k)).astype(np.uint8)
    stored, value, ldb = {
        "f32": (w, w, k),
        "bf16": (bf16(w), widen_bf16(bf16(w)), k),
        "f16": (w.astype(np.float16), w.astype(np.float16), k),
        "ternary": (pack_blocks(codes), codes.astype(np.int8) - 1, k // 4),
    }[store]
    segments = Segments((16, 32, n), (0.5, 2.0, 3.0)) if store == "ternary" else None
    value = value.astype(np.float64) * (np.repeat([0.5, 2.0, 3.0], (16, 16, n - 32))[:, None] if segments else 1)
    terms, columns = (k, n) if b_layout == "nk" else (n, k)
    a, out = normal(m, terms), lab.output(m, columns)
    with lab.section:
        matmul(
            plan,
            out.tensor,
            lab.input(a),
            lab.input(stored, {"bf16": "bf16"}.get(store)),
            m=m,
            n=columns,
            k=terms,
            store=store,
            b_layout=b_layout,
            ldb=ldb,
            segments=segments,
        )
    lab.run()
    assert relative_error(out.value, a.astype(np.float64) @ (value.T if b_layout == "nk" else value)) < FLOAT32


@pytest.mark.parametrize("a_layout, b_layout", [("row", "nk"), ("row", "kn"), ("col", "kn")])
@pytest.mark.parametrize("k", [300, WHOLE])
def test_the_bits_of_a_sum_do_not_depend_on_the_tile(plan, a_layout, b_layout, k):
    m, n = 67, 112
    assert k > BLOCKED_TERMS
    lab, a, b, outs = Lab(plan), normal(m, k), normal(n, k), {}
    x = lab.input(pad(a.T)[:, : padded(m)] if a_layout == "col" else a)
    w = lab.input(b if b_layout == "nk" else b.T)
    with lab.section:
        for tile in TILES:
            outs[tile] = lab.output(m, n)
            matmul(plan, outs[tile].tensor, x, w, m=m, n=n, k=k, a_layout=a_layout, b_layout=b_layout, tile=tile)
    lab.run()
    assert relative_error(outs["tall"].value, a.astype(np.float64) @ b.T) < FLOAT32
    for tile, out in outs.items():
        assert np.array_equal(out.value, outs["tall"].value), tile


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("k", [16, 80, 2576, 4 * WHOLE])
def test_int8_product_is_an_integer_product(plan, tile, k):
    m, n = 67, 112
    lab, x = Lab(plan), normal(m, k)
    codes = np.random.default_rng(k).integers(0, 3, (n, k)).astype(np.uint8)
    xq, s = quantize_forward(x)
    product = xq.astype(np.int64) @ (codes.astype(np.int64) - 1).T
    qscale = np.stack([1 / s, xq.sum(1, dtype=np.int32).view(np.float32)], 1).astype(np.float32)
    out = lab.output(m, n)
    with lab.section:
        matmul(
            plan,
            out.tensor,
            lab.input(xq.view(np.uint32)),
            lab.input(pack_blocks(codes)),
            m=m,
            n=n,
            k=k,
            lda=k // 4,
            store="ternary",
            ldb=k // 4,
            qscale=lab.input(qscale),
            segments=Segments((n,), (1.0,)),
            tile=tile,
        )
    lab.run()
    assert np.array_equal(out.value, product.astype(np.float32) * qscale[:, :1])


@pytest.mark.parametrize("int8", [False, True])
def test_epilogue_adds_lora_segments_residual_and_itself(plan, int8):
    m, k, ends, ranks = 37, 64, (80, 96, 144), (4, 0, 20)
    n, lab = ends[-1], Lab(plan)
    x, h, residual = normal(m, k), normal(m, 24, seed=1), normal(m, n, seed=2)
    factors = [normal(80, 4, seed=3), normal(48, 20, seed=4)]
    codes = np.random.default_rng(0).integers(0, 3, (n, k)).astype(np.uint8)
    lora = LowRank(
        "nk", lab.input(h), lab.input(np.concatenate([f.ravel() for f in factors])), ranks, (0, 0, 4), (0, 0, 320)
    )
    expected = residual.astype(np.float64)
    expected[:, :80] += h[:, :4] @ factors[0].T.astype(np.float64)
    expected[:, 96:] += h[:, 4:] @ factors[1].T.astype(np.float64)
    scales = np.repeat([2.0, 3.0, 0.25], [80, 16, 48])
    out = lab.output(m, n, initial=normal(m, n, seed=5))
    kwargs = {
        "m": m,
        "n": n,
        "k": k,
        "lora": lora,
        "residual": lab.input(residual),
        "store": "ternary",
        "ldb": k // 4,
        "segments": Segments(ends, (2.0, 3.0, 0.25)),
    }
    if int8:
        xq, s = quantize_forward(x)
        qscale = np.stack([1 / s, xq.sum(1, dtype=np.int32).view(np.float32)], 1).astype(np.float32)
        kwargs |= {"a": lab.input(xq.view(np.uint32)), "lda": k // 4, "qscale": lab.input(qscale)}
        x = xq / s[:, None].astype(np.float64)
    else:
        kwargs |= {"a": lab.input(x), "accumulate": True}
        expected += normal(m, n, seed=5)
    with lab.section:
        matmul(plan, out.tensor, b=lab.input(pack_blocks(codes)), **kwargs)
    lab.run()
    assert relative_error(out.value, expected + x @ ((codes.astype(np.float64) - 1).T * scales)) < FLOAT32


def test_backward_epilogue(plan):
    m, n, k, rank = 20, 96, 48, 12
    lab, dy, w, dh, factor = Lab(plan), normal(m, k), normal(k, n), normal(m, rank), normal(rank, n)
    out = lab.output(m, n)
    with lab.section:
        matmul(
            plan,
            out.tensor,
            lab.input(dy),
            lab.input(w),
            m=m,
            n=n,
            k=k,
            b_layout="kn",
            lora=LowRank("kn", lab.input(dh), lab.input(factor), (rank,), (0,), (0,)),
        )
    lab.run()
    assert relative_error(out.value, dy.astype(np.float64) @ w + dh.astype(np.float64) @ factor) < FLOAT32


def test_splits_offsets_and_alpha(plan):
    m, n, k, splits = 24, 32, 1000, 3
    lab, a, b = Lab(plan), normal(k, 48), normal(k, 64)
    parts, out = lab.output(splits, m, n), lab.output(m, 64, initial=normal(m, 64))
    with lab.section:
        matmul(
            plan,
            parts.tensor.view(0, (splits, m, n)),
            lab.input(a),
            lab.input(b),
            m=m,
            n=n,
            k=k,
            a_layout="col",
            b_layout="kn",
            a_off=16,
            b_off=8,
            alpha=0.5,
            splits=splits,
        )
        sum_splits(plan, out.tensor, parts.tensor.view(0, (splits, m, n)), accumulate=True, o_off=16)
    lab.run()
    expected = normal(m, 64).astype(np.float64)
    expected[:, 16:48] += 0.5 * a[:, 16:40].T.astype(np.float64) @ b[:, 8:40]
    assert relative_error(out.value, expected) < FLOAT32


def test_rows_do_not_depend_on_their_number_or_the_tile(plan):
    """A token's bits are the same alone and in a batch of any size."""
    n, k, lab, a, b = 144, 336, Lab(plan), normal(200, 336), normal(144, 336)
    outs = [lab.output(m, n) for m in (1, 40, 200, 200)]
    with lab.section:
        for out, tile in zip(outs, (None, None, None, "tall"), strict=True):
            matmul(plan, out.tensor, lab.input(a), lab.input(b), m=out.shape[0], n=n, k=k, tile=tile)
    lab.run()
    for out in outs[:-1]:
        assert np.array_equal(out.value, outs[-1].value[: out.shape[0]])


def test_bad_shapes_are_named(plan):
    lab = Lab(plan)
    with pytest.raises(ValueError, match="multiples of 4"), lab.section:
        matmul(plan, lab.output(4, 16).tensor, lab.input(normal(4, 6)), lab.input(normal(16, 6)), m=4, n=16, k=6)
    with pytest.raises(ValueError, match="3 splits"), lab.section:
        matmul(
            plan,
            lab.output(4, 16).tensor,
            lab.input(normal(4, 16)),
            lab.input(normal(16, 16)),
            m=4,
            n=16,
            k=16,
            splits=3,
        )


@pytest.mark.parametrize("asked", ["qscale", "residual", "lora nk", "accumulate"])
def test_splits_refuse_what_they_would_do_more_than_once(plan, asked):
    lab = Lab(plan)
    x = lab.input(normal(16, 16))
    options = {"qscale": x, "residual": x, "lora nk": LowRank("nk", x, x, (4,), (0,), (0,)), "accumulate": True}
    with pytest.raises(ValueError, match=f"2 splits cannot have {asked}"), lab.section:
        matmul(plan, lab.output(32, 16).tensor, x, x, m=16, n=16, k=16, splits=2, **{asked.split()[0]: options[asked]})
