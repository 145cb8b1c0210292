"""Matrix-vector products of a few rows, and what feeds them, against NumPy float64."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.gpu import padded
from lorawgpu.ops.matmul import LowRank, Segments
from lorawgpu.ops.matvec import MAX_ROWS, Down, Source, matvec_forward, matvec_input, team_of, unroll_of
from lorawgpu.weights.device import Part, Weight, dense_weight, pack_blocks
from lorawgpu.weights.tensors import Dense

# float32 sums of K terms of order 1 in a tree: a few roundings of 6e-8 of the partial sums, which are below 100 here.
RTOL, ATOL = 1e-5, 2e-5


def stored(device, matrix, dtype):
    """A dense weight, and the float64 values that it holds."""
    data = {"f32": matrix, "f16": matrix.astype(np.float16), "bf16": (matrix.view(np.uint32) >> 16).astype(np.uint16)}
    dense = Dense(data[dtype], dtype)
    return dense_weight(device, [dense], "weight"), dense.float32().astype(np.float64)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 123, 48), (3, 64, 576), (MAX_ROWS, 37, 1536)])
def test_dense(plan, dtype, rows, out, inner):
    lab = Lab(plan)
    weight, exact = stored(plan.device, normal(out, inner), dtype)
    x = normal(rows, inner, seed=1)
    y, added = lab.rows(rows, out), lab.rows(rows, out, initial=pad(normal(rows, out, seed=2)))
    with lab.section:
        matvec_forward(plan, y.tensor, lab.padded(x), weight, rows=rows)
        matvec_forward(plan, added.tensor, lab.padded(x), weight, rows=rows, accumulate=True)
    lab.run()
    want = x.astype(np.float64) @ exact.T
    assert_close(y.value, want, RTOL, ATOL * inner**0.5)
    assert_close(added.value, want + normal(rows, out, seed=2), RTOL, ATOL * inner**0.5)


def ternary(device, codes, ends, scales, split=None):
    """A ternary weight of stacked segments; `split`: rows of its first part."""
    packed = pack_blocks(codes)
    cuts = [0, *([split] if split else []), len(codes)]
    parts = tuple(
        Part(a, b, device.upload(packed[a // 4 : b // 4], label=f"rows {a}"))
        for a, b in zip(cuts, cuts[1:], strict=False)
    )
    return Weight(len(codes), codes.shape[1], "ternary", Segments(ends, scales), parts, int8_input=True)


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS])
@pytest.mark.parametrize("inner", [16, 528, 2560])
def test_ternary_with_adapters_in_parts(plan, rows, inner):
    """Three segments of their own scale and adapter (the second has none), the weight split inside the third."""
    lab, rng = Lab(plan), np.random.default_rng(rows + inner)
    ends, scales, out = (64, 96, 176), (0.5, 2.0, 0.25), 176
    codes = rng.integers(0, 3, (out, inner)).astype(np.uint8)
    xq = rng.integers(-128, 128, (rows, inner)).astype(np.int8)
    inverse = rng.random(rows).astype(np.float32)
    qscale = np.stack([inverse, xq.sum(1, dtype=np.int32).view(np.float32)], 1).view(np.uint32)
    h, flat = normal(rows, 12), normal(64 + 80 * 8 + 64 * 4)
    lora = LowRank("nk", lab.input(h), lab.input(flat), (4, 0, 8), (8, 0, 0), (640, 0, 0))
    y = lab.rows(rows, out)
    weight = ternary(plan.device, codes, ends, scales, split=112)
    with lab.section:
        source = lab.input(xq.view(np.uint32))
        matvec_forward(plan, y.tensor, source, weight, rows=rows, qscale=lab.input(qscale), lora=lora)
    lab.run()
    segment = np.repeat(scales, np.diff((0, *ends)))
    want = xq.astype(np.float64) @ (codes.astype(np.float64) - 1).T * segment * inverse[:, None]
    want[:, :64] += h[:, 8:12] @ flat[640:896].reshape(64, 4).T
    want[:, 96:] += h[:, :8] @ flat[:640].reshape(80, 8).T
    assert_close(y.value, want, RTOL, 1e-5)


def test_a_row_has_the_same_bits_alone(plan):
    lab, x = Lab(plan), normal(7, 576)
    weight, _ = stored(plan.device, normal(80, 576, seed=3), "bf16")
    together, alone = lab.rows(7, 80), lab.rows(1, 80)
    with lab.section:
        matvec_forward(plan, together.tensor, lab.padded(x), weight, rows=7)
        matvec_forward(plan, alone.tensor, lab.padded(x[4:5]), weight, rows=1)
    lab.run()
    np.testing.assert_array_equal(together.value[4], alone.value[0])


def test_too_many_rows_are_refused(plan):
    lab = Lab(plan)
    weight, _ = stored(plan.device, normal(16, 16), "f32")
    with lab.section, pytest.raises(ValueError, match="9 rows, want 1 to 8"):
        matvec_forward(plan, lab.rows(9, 16).tensor, lab.padded(normal(9, 16)), weight, rows=MAX_ROWS + 1)


@pytest.mark.parametrize(
    ("terms", "quads", "team"), [(4, 4, 32), (160, 960, 32), (432, 640, 64), (5000, 640, 128), (640, 32064, 32)]
)
def test_how_many_lanes_share_a_sum(terms, quads, team):
    assert team_of(terms, quads) == team


def test_steps_are_unrolled_evenly():
    assert [unroll_of(steps, 4) for steps in (1, 4, 5, 9, 20)] == [1, 4, 3, 3, 4]


def gate(g, u, act):
    return np.maximum(g, 0) ** 2 * u if act == "relu2" else g / (1 + np.exp(-g)) * u


def source_of(lab, kind, rows, width):
    """A `Source` and the float64 rows that it stands for."""
    if kind == "rows":
        x = normal(rows, width)
        return Source("rows", lab.padded(x)), x.astype(np.float64)
    if kind in ("silu", "relu2"):
        g, u = normal(rows, width), normal(rows, width, seed=1)
        gu = lab.input(np.concatenate([pad(g), pad(u)], 1))
        return Source("gate", gu, act=kind), gate(g.astype(np.float64), u, kind)
    heads, splits, used = width // 8, 32, 11
    parts, stats = normal(rows, splits, padded(width)), np.zeros((rows, splits, heads, 4), np.float32)
    stats[..., 0], stats[..., 1], stats[..., 2] = 5 * normal(rows, splits, heads), 1.5, used
    weights = np.exp2(stats[:, :used, :, 0].astype(np.float64))
    values = parts[:, :used, :width].reshape(rows, used, heads, 8)
    combined = (weights[..., None] * values).sum(1) / (weights.sum(1) * 1.5)[..., None]
    source = Source("attention", lab.input(parts), stats=lab.input(stats), head_dim=8)
    return source, combined.reshape(rows, width)


@pytest.mark.parametrize("kind", ["rows", "silu", "relu2", "attention"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
def test_input(plan, kind, normed, quantised):
    rows, width = 3, 1096
    lab = Lab(plan)
    source, v = source_of(lab, kind, rows, width)
    weight, a = normal(1, width, seed=5), normal(12, width, seed=6)
    if normed:
        v = v / np.sqrt((v**2).mean(1, keepdims=True) + 1e-5) * weight
    ld, state = padded(width), lab.state()
    h = lab.output(rows, 12)
    out = lab.output(rows, ld // 4, dtype="u32") if quantised else lab.output(rows, ld)
    qscale = lab.output(rows, 2, dtype="u32") if quantised else None
    with lab.section:
        matvec_input(
            plan,
            out.tensor,
            source,
            state.tensor,
            rows=rows,
            width=width,
            eps=1e-5,
            record_id=3,
            weight=lab.input(pad(weight)[0]) if normed else None,
            qscale=qscale.tensor if quantised else None,
            down=Down(h.tensor, lab.padded(a), ((0, 2.0), (4, 0.5))),
        )
    lab.run()
    scale = np.repeat([2.0, 0.5], [4, 8])
    np.testing.assert_allclose(h.value, v @ a.T * scale, rtol=1e-4, atol=1e-4 * np.abs(v).max())
    assert not state.value.any()
    if not quantised:
        return assert_close(out.value, v, 1e-4, 1e-5)
    s = 127 / np.maximum(np.abs(v).max(1, keepdims=True), 1e-5)
    q = out.value.view(np.int8)
    assert np.abs(q[:, :width] - np.rint(v * s)).max() <= 1  # float32 may round a near tie the other way
    assert (q[:, :width] != np.rint(v * s)).mean() < 2e-3
    np.testing.assert_allclose(qscale.value[:, :1].view(np.float32), 1 / s, rtol=1e-5)
    np.testing.assert_array_equal(qscale.value[:, 1].view(np.int32), q.sum(1, dtype=np.int32))


def test_a_non_finite_input_marks_the_step(plan):
    lab, x = Lab(plan), normal(2, 64)
    x[1, 5] = np.nan
    state = lab.output(16, initial=[0, 0xFFFFFFFF] + [0] * 14, dtype="u32")
    out, qscale = lab.output(2, 16, dtype="u32"), lab.output(2, 2, dtype="u32")
    with lab.section:
        matvec_input(
            plan,
            out.tensor,
            Source("rows", lab.padded(x)),
            state.tensor,
            rows=2,
            width=64,
            eps=1e-5,
            record_id=7,
            qscale=qscale.tensor,
        )
    lab.run()
    assert state.value[0] == 1 and state.value[1] == 7
