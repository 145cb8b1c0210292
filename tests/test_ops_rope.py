"""Rotary embedding into the KV cache and back, against the reference."""

import numpy as np
import pytest
from oplab import Lab, assert_close, normal, pad

from lorawgpu.gpu import padded
from lorawgpu.ops.rope import rope_backward, rope_forward, rope_table
from lorawgpu.reference import rope as reference

POSITIONS = 300
ATOL = 2e-6  # two products and a sum of values near 4, in float32, with float32 cos and sin


def layout(n_heads, n_kv_heads, head_dim, gap):
    """Column offsets of k and v and the width of qkv: parts padded (as in the model), or right after one another."""
    Q, KV = n_heads * head_dim, n_kv_heads * head_dim
    k_off = padded(Q) if gap else Q
    v_off = k_off + (padded(KV) if gap else KV)
    return Q, KV, k_off, v_off, padded(v_off + KV)


def case(lab, n_heads, n_kv_heads, head_dim, slot, cache_rows, gap=True):
    Q, KV, k_off, v_off, ld = layout(n_heads, n_kv_heads, head_dim, gap)
    rows = len(slot)
    slot, position = np.asarray(slot, np.int32), np.arange(rows, dtype=np.int32) * 37 % POSITIONS
    inv_freq = reference.rope_inv_freq(10000.0, head_dim)
    qkv, dq = normal(rows, ld), normal(rows, Q, seed=1)
    dk, dv = normal(cache_rows, KV, seed=2), normal(cache_rows, KV, seed=3)
    old = normal(cache_rows, padded(KV), seed=4)
    q, dqkv = lab.rows(rows, Q), lab.output(rows, ld)
    kcache, vcache = lab.output(*old.shape, initial=old), lab.output(*old.shape, initial=old)
    tables = [lab.input(position), lab.input(slot), lab.input(rope_table(inv_freq, POSITIONS))]
    sizes = {"rows": rows, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "k_off": k_off, "v_off": v_off}
    caches = [c.whole.view(64, old.shape) for c in (kcache, vcache)]  # exactly cache_rows: no spare rows
    rope_forward(lab.plan, q.tensor, *caches, lab.input(qkv), *tables, **sizes)
    rope_backward(lab.plan, dqkv.tensor, lab.padded(dq), lab.padded(dk), lab.padded(dv), *tables, **sizes)

    def check():
        cos, sin = reference.rope_tables(position, inv_freq)
        x = qkv.astype(np.float64)
        inside = (slot >= 0) & (slot < cache_rows)
        assert_close(q.value, reference.rope_forward(x[:, :Q], cos, sin), 0, ATOL)
        want_k, want_v = old.copy(), old.copy()
        want_k[slot[inside]] = pad(reference.rope_forward(x[:, k_off : k_off + KV], cos, sin))[inside]
        want_v[slot[inside]] = pad(x[:, v_off : v_off + KV])[inside]
        np.testing.assert_allclose(kcache.value, want_k, atol=ATOL, rtol=0)
        assert np.array_equal(vcache.value, want_v)

        want = np.zeros((rows, ld))
        want[:, :Q] = reference.rope_backward(dq.astype(np.float64), cos, sin)
        at = np.where(inside, slot, 0)
        want[:, k_off : k_off + KV] = reference.rope_backward(dk[at].astype(np.float64), cos, sin) * inside[:, None]
        want[:, v_off : v_off + KV] = dv[at] * inside[:, None]
        np.testing.assert_allclose(dqkv.value, want, atol=ATOL, rtol=0)

    return check


def test_matches_reference(plan):
    lab = Lab(plan)
    with lab.section:
        checks = [
            case(lab, 4, 2, 64, range(5), 5),
            case(lab, 20, 5, 128, [2, 0, 1], 9),  # a longer cache, any order
            case(lab, 3, 1, 6, [4, 7, 2, -1], 7),  # 7 and -1 lie outside: not written, gradient 0
            case(lab, 3, 3, 10, range(3), 3, gap=False),
        ]
    lab.run()
    for check in checks:
        check()


def test_table_is_rounded_once():
    """float64 all the way: a float32 angle at position 100000 would be off by 4e-3."""
    inv_freq = reference.rope_inv_freq(500000.0, 8)
    cos, sin = reference.rope_tables([100000], inv_freq)
    assert np.array_equal(rope_table(inv_freq, 100001)[-1:], np.concatenate([cos, sin], axis=1).astype(np.float32))


def test_parts_that_overlap_are_refused(plan):
    lab = Lab(plan)
    ids, table = lab.input(np.zeros(2, np.int32)), lab.input(rope_table(np.ones(4), 9))
    q, cache = lab.rows(2, 32), lab.rows(4, 16)
    with lab.section, pytest.raises(ValueError, match="do not hold"):
        rope_forward(
            plan,
            q.tensor,
            cache.tensor,
            cache.tensor,
            lab.input(normal(2, 64)),
            ids,
            ids,
            table,
            rows=2,
            n_heads=4,
            n_kv_heads=2,
            k_off=16,
            v_off=48,
        )
