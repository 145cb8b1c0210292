"""Flash decoding of single tokens against a float64 softmax over the same cache."""

import numpy as np
import pytest
from oplab import Lab, normal

from lorawgpu.gpu import padded
from lorawgpu.ops.attention_decode import KEYS, SPLITS, attention_decode, fits, parts_shape, stats_shape
from lorawgpu.ops.decode_state import FIELDS, STRIDE
from lorawgpu.ops.rope import rope_table


def rotated(x, angle):
    """RoPE of heads x [.., HD]."""
    low, high = np.split(x.astype(np.float64), 2, -1)
    return np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], -1)


def combined(parts, stats, heads, head_dim):
    """What matvec_input.wgsl makes of the parts: [rows, heads * head_dim]."""
    out = []
    for part, stat in zip(parts.astype(np.float64), stats.astype(np.float64), strict=True):
        used = int(stat[0, 0, 2])
        weight = np.exp2(stat[:used, :, 0] - stat[:used, :, 0].max(0))
        values = part[:used, : heads * head_dim].reshape(used, heads, head_dim)
        out.append((weight[..., None] * values).sum(0) / (weight * stat[:used, :, 1]).sum(0)[:, None])
    return np.stack(out).reshape(len(out), -1)


def expected(q, k, v, group, scale):
    """One query [NH, HD] against keys and values [n, NKV, HD]."""
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    score = np.einsum("hd,nhd->hn", q, k) * scale
    weight = np.exp(score - score.max(1, keepdims=True))
    return np.einsum("hn,nhd->hd", weight / weight.sum(1, keepdims=True), v).ravel()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "lengths", "span"),
    [
        (20, 5, 128, (1, 70), 128),
        (9, 3, 64, (65, 64, 1), 256),
        (8, 1, 8, (5,), 128),  # eight query heads share keys in two workgroups
        (4, 4, 80, (100, 3), 128),  # lanes that own nothing
        (2, 1, 256, (33,), 128),
        (2, 1, 16, (KEYS * SPLITS + 5, 7), 2176),  # splits of two blocks
    ],
)
def test_attention_decode(plan, heads, kv_heads, head_dim, lengths, span):
    lab, rows = Lab(plan), len(lengths)
    q_ld, kv_ld, start = padded(heads * head_dim), padded(kv_heads * head_dim), 32  # a sequence need not begin its span
    position = np.array(lengths) + 2
    first = np.arange(rows) * span + start
    slot = first + np.array(lengths) - 1
    qkv, cache = 3 * normal(rows, q_ld + 2 * kv_ld), normal(2, rows * span, kv_ld)
    table = rope_table(10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2)), max(lengths) + 3)
    state = np.zeros((len(FIELDS), STRIDE), np.int32)
    for name, values in (("position", position), ("slot", slot), ("kv_start", first)):
        state[FIELDS.index(name), :rows] = values
    parts = lab.output(*parts_shape(rows, q_ld))
    stats = lab.output(*stats_shape(rows, heads))
    k, v = (lab.output(rows * span, kv_ld, initial=c) for c in cache)
    scale = head_dim**-0.5
    with lab.section:
        attention_decode(
            plan,
            *(t.tensor for t in (parts, stats, k, v)),
            lab.input(qkv),
            lab.input(table),
            lab.input(state),
            count=rows,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            k_off=q_ld,
            v_off=q_ld + kv_ld,
            scale=scale,
        )
    lab.run()
    got = combined(parts.value, stats.value, heads, head_dim)
    for row in range(rows):
        angle = position[row] * 10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        width = kv_heads * head_dim
        q = rotated(qkv[row, : heads * head_dim].reshape(heads, head_dim), angle)
        new_k = rotated(qkv[row, q_ld : q_ld + width].reshape(kv_heads, head_dim), angle)
        new_v = qkv[row, q_ld + kv_ld : q_ld + kv_ld + width]
        np.testing.assert_allclose(k.value[slot[row], :width], new_k.ravel(), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(v.value[slot[row], :width], new_v)
        seen = slice(first[row], slot[row])
        keys = np.concatenate([cache[0, seen, :width].reshape(-1, kv_heads, head_dim), new_k[None]])
        values = np.concatenate([cache[1, seen, :width], new_v[None]]).reshape(-1, kv_heads, head_dim)
        # scores are sums of head_dim terms, up to 20 in all: exp turns their rounding into 1e-5 of a weight
        np.testing.assert_allclose(got[row], expected(q, keys, values, heads // kv_heads, scale), rtol=1e-4, atol=3e-5)
    for out, before in ((k, cache[0]), (v, cache[1])):
        others = np.ones(len(before), bool)
        others[slot] = False
        np.testing.assert_array_equal(out.value[others], before[others])  # no other slot is touched


def test_which_heads_fit():
    assert fits(64) and fits(80) and fits(256) and not fits(12) and not fits(264)
