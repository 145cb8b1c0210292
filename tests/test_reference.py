"""Values of the reference that gradient checks do not determine."""

import numpy as np
import pytest
from gradcheck import relative_error

from lorawgpu.families.rope import Rope
from lorawgpu.reference.adamw import adamw_update, clip_scale, grad_norm
from lorawgpu.reference.attention import attention_forward
from lorawgpu.reference.cross_entropy import head_loss
from lorawgpu.reference.dense import dense_forward
from lorawgpu.reference.embedding import embedding_forward
from lorawgpu.reference.quantize import dequantize, quantize_forward
from lorawgpu.reference.rope import rope_forward, rope_inv_freq, rope_tables
from lorawgpu.reference.ternary import bitlinear_forward, ternary_from_master, ternary_pack, ternary_unpack


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


# Three queries on a cache of six slots: a sequence of one, then two rows of another with history; slot 5 is unused.
SHAPE = {"n_heads": 4, "n_kv_heads": 2, "scale": 0.4}


def test_quantizer_rounds_half_to_even_and_saturates():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -127.0], [0.0] * 6, [1e-7] * 6])
    xq, s = quantize_forward(x)
    assert xq.dtype == np.int8 and s.dtype == np.float32
    assert xq[0].tolist() == [127, 0, 2, 2, 0, -127]
    assert s[0] == 1 and xq[1].tolist() == [0] * 6
    assert s[1] == np.float32(127) / np.float32(1e-5)  # the floor of 1e-5, not a division by zero
    assert xq[2].tolist() == [1] * 6  # 1.27 steps


def test_quantizer_error_is_at_most_half_a_step():
    x = 100 * normal(9, 33)
    xq, s = quantize_forward(x)
    assert np.all(np.abs(dequantize(xq, s) - x) * s[:, None] <= 0.5 + 1e-4)  # 1e-4: float32 rounding of x * s


@pytest.mark.parametrize("out", [1, 3, 4, 5, 8, 10])
def test_packed_store_round_trip(out):
    T = np.random.default_rng(out).integers(-1, 2, (out, 6)).astype(np.int8)
    packed = ternary_pack(T)
    rows = -(-out // 4)
    assert packed.shape == (rows, 6) and packed.dtype == np.uint8
    assert np.array_equal(ternary_unpack(packed, out), T)
    for row in range(out):  # the contract, spelled out
        assert np.array_equal(packed[row % rows] >> 2 * (row // rows) & 3, T[row] + 1)


def test_bitlinear_is_the_product_of_dequantized_parts():
    x, T, w = normal(3, 8), np.random.default_rng(0).integers(-1, 2, (5, 8)).astype(np.int8), 0.03
    xq, s = quantize_forward(x)
    expected = dense_forward(dequantize(xq, s), w * T)
    assert relative_error(bitlinear_forward(xq, s, T, w), expected) < 1e-14


def test_master_weight_is_quantized_over_the_whole_matrix():
    T, w = ternary_from_master(np.array([[0.2, -0.4], [1.0, 0.0]], np.float32))
    assert w == np.float32(0.4) and T.tolist() == [[0, -1], [1, 0]]  # 0.2 / 0.4 is a tie: to even
    assert ternary_from_master(np.zeros((2, 2)))[1] == np.float32(1e-5)


def test_embedding_takes_rows():
    weight = normal(5, 3)
    assert np.array_equal(embedding_forward(np.array([4, 0]), weight, 2.0), 2 * weight[[4, 0]])


def test_attention_rows_are_independent_of_the_batch():
    """A packed batch equals its sequences run separately; one new query equals the last row of the whole sequence."""
    q, k, v = normal(7, 20), normal(7, 10, seed=1), normal(7, 10, seed=2)
    packed, _ = attention_forward(q, k, v, slot=np.arange(7), kv_start=np.array([0, 0, 0, 3, 3, 3, 3]), **SHAPE)
    for rows in (slice(0, 3), slice(3, 7)):
        n = rows.stop - rows.start
        alone, _ = attention_forward(q[rows], k[rows], v[rows], slot=np.arange(n), kv_start=np.zeros(n, int), **SHAPE)
        assert relative_error(packed[rows], alone) < 1e-14
    new, _ = attention_forward(q[6:], k, v, slot=np.array([6]), kv_start=np.array([3]), **SHAPE)
    assert relative_error(new, packed[6:]) < 1e-14


def test_rope_keeps_relative_positions():
    """q . k depends only on the distance between positions, and position 0 is unchanged."""
    q, k, inv_freq = normal(1, 6), normal(1, 6, seed=1), rope_inv_freq(100.0, 6)

    def dot(i, j):
        return (rope_forward(q, *rope_tables([i], inv_freq)) @ rope_forward(k, *rope_tables([j], inv_freq)).T).item()

    assert abs(dot(7, 3) - dot(104, 100)) < 1e-12
    assert abs(dot(7, 3) - dot(3, 7)) > 1e-3
    assert np.array_equal(rope_forward(q, *rope_tables([0], inv_freq)), q)


def test_rope_frequencies_are_the_config_s():
    assert np.array_equal(rope_inv_freq(5e5, 128), Rope(5e5).inv_freq(128))


def test_head_chunks_do_not_change_the_loss():
    x, weight, targets = normal(5, 6), normal(11, 6), np.array([2, 0, 10, 2, 7])
    whole, parts = head_loss(x, weight, targets, 5), head_loss(x, weight, targets, 2)
    assert relative_error(parts[0], whole[0]) < 1e-14 and relative_error(parts[1], whole[1]) < 1e-14


def test_adamw_first_step_and_clip():
    """After one step, bias-corrected m and v are g and g^2, so the update is lr * sign(g), after the decay of p."""
    p, g = np.array([2.0, -3.0]), np.array([0.3, -0.4])
    assert grad_norm([g[:1], g[1:]]) == pytest.approx(0.5, rel=1e-15)
    assert clip_scale(0.5, 1.0) == 1.0 and clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    new, m, v = adamw_update(p, g, np.zeros(2), np.zeros(2), 1, 0.1, 0.9, 0.999, 1e-8, 0.01)
    assert np.allclose(new, p * (1 - 0.1 * 0.01) - 0.1 * np.sign(g), rtol=1e-7)
    assert np.allclose(m, 0.1 * g) and np.allclose(v, 0.001 * g * g)
