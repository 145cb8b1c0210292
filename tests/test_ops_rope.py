"""From the fused projection to attention and back, against the reference."""

import numpy as np
import pytest
from oplab import Lab, check, normal

from lorawgpu.doctor.kernels import HEADS
from lorawgpu.doctor.rotary import rotary
from lorawgpu.ops.decode_state import FIELDS, STRIDE, field
from lorawgpu.ops.rope import Heads, head_constants, rope_backward, rope_forward, rope_table
from lorawgpu.reference import rope as reference


def test_matches_reference(plan):
    check(
        plan,
        rotary,
        ("plain", 5, 4, 2, 64, 0, 5),
        ("plain", 3, 20, 5, 128, 2, 9),  # a longer cache
        ("plain", 4, 3, 1, 6, -1, 2),  # slots -1 and 2 are out of range: not written, gradient 0
        ("plain", 4, 3, 1, 6, 4, 7),
        ("tight", 3, 3, 3, 10, 0, 3),
    )


@pytest.mark.parametrize("variant", HEADS)
def test_options(plan, variant):
    """Heads of vec4s; of floats; and of some slots outside the cache."""
    check(plan, rotary, (variant, 5, 4, 2, 16, 0, 5), (variant, 3, 3, 1, 6, 1, 9), (variant, 4, 3, 1, 24, -1, 2))


# Each family's options at its own sizes: heads, key heads, head size.
FAMILIES = {
    "Qwen2": ("biased", 14, 2, 64),
    "Qwen3": ("normed", 16, 8, 128),
    "Gemma 3": ("normed", 4, 1, 256),
    "Gemma 4, local": ("normed values", 8, 1, 256),
    "Gemma 4, global": ("normed values", 8, 1, 512),
    "Gemma 4, shared": ("queries only", 8, 1, 512),
    "Gemma 4, dense": ("values from keys", 4, 2, 512),
    "OLMo 2": ("normed rows", 16, 16, 128),
    "OLMo 3": ("normed rows", 40, 8, 128),
    "Phi-3": ("partial", 24, 8, 96),
    "Granite": ("scaled values", 32, 8, 80),
    "SmolLM3": ("unrotated", 16, 4, 128),
    "Ministral 3": ("scaled queries", 32, 8, 128),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(plan, family):
    variant, *sizes = FAMILIES[family]
    check(plan, rotary, (variant, 3, *sizes, 1, 5))


@pytest.mark.parametrize("variant", ["normed values", "everything, whole rows", "only values normed"])
def test_small_values(plan, variant):
    """Rows so small that eps matters."""
    check(plan, rotary, (variant, 3, 3, 1, 10, 0, 3), gain=3e-2)


def test_more_groups_than_one_grid_dimension(plan):
    check(plan, rotary, ("plain queries only", 11000, 3, 1, 130, 0, 0))


def test_a_decoded_row_has_the_same_bits(plan):
    """Two rows with position and slot from the state of decoding, against the same rows among others."""
    heads, qkv, position = Heads(3, 1, 8, 8, 32, 48, norm="head", eps=1e-5), normal(5, 64), np.arange(5, dtype=np.int32)
    lab = Lab(plan)
    weights, state = normal(2, 8), np.zeros((len(FIELDS), STRIDE), np.int32)
    state[FIELDS.index("position"), :2], state[FIELDS.index("slot"), :2] = position[3:], (1, 0)
    state = lab.input(state)
    options = {"constants": lab.input(head_constants(heads, 64, q_norm=weights[0], k_norm=weights[1])), "heads": heads}
    table = lab.input(rope_table(np.ones(4), 5))
    whole, decoded = ([lab.rows(rows, width) for width in (24, 8, 8)] for rows in (5, 2))
    index = lab.input(position), lab.input(position)
    fields = field(state, "position", 2), field(state, "slot", 2)
    with lab.section:
        rope_forward(plan, *(o.exact for o in whole), lab.input(qkv), *index, table, rows=5, **options)
        rope_forward(plan, *(o.exact for o in decoded), lab.input(qkv[3:]), *fields, table, rows=2, **options)
    lab.run()
    (q, *caches), (few_q, *few_caches) = ([o.value for o in outputs] for outputs in (whole, decoded))
    assert np.array_equal(few_q, q[3:])
    assert all(np.array_equal(few[::-1], many[3:]) for few, many in zip(few_caches, caches, strict=True))


def test_table_is_rounded_once():
    """float64 all the way: a float32 angle at position 100000 would be off by 4e-3."""
    inv_freq = reference.rope_inv_freq(500000.0, 8)
    cos, sin = reference.rope_tables([100000], inv_freq)
    for factor in (1.0, 1.19):
        want = (factor * np.concatenate([cos, sin], axis=1)).astype(np.float32)
        assert np.array_equal(rope_table(inv_freq, 100001, factor)[-1:], want)


def test_constants_lie_in_the_columns_of_qkv():
    norm = {"q_norm": np.array([1.0, 2.0]), "k_norm": np.array([3.0, 4.0])}
    bias = np.arange(4.0) + 5, np.array([9.0, 10.0]), np.array([11.0, 12.0])
    want_norm, want_bias = [1, 2, 1, 2, 3, 4, 0, 0, 0, 0], [5, 6, 7, 8, 9, 10, 11, 12, 0, 0]
    places = {"heads": 2, "kv_heads": 1, "head_dim": 2, "rot": 2, "k_off": 4, "v_off": 6}
    assert head_constants(Heads(**places), 10).shape == (0, 10)
    assert head_constants(Heads(**places, norm="head"), 10, **norm).tolist() == [want_norm]
    assert head_constants(Heads(**places, bias=True), 10, bias=bias).tolist() == [want_bias]
    both = head_constants(Heads(**places, bias=True, norm="head"), 10, bias=bias, **norm)
    assert both.tolist() == [want_norm, want_bias]
    rows = head_constants(Heads(**places, norm="row"), 10, q_norm=np.arange(4.0), k_norm=norm["k_norm"])
    assert rows.tolist() == [[0, 1, 2, 3, 3, 4, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"weights of a row norm: got \(2,\), wanted \(4,\)"):
        head_constants(Heads(**places, norm="row"), 10, **norm)
    with pytest.raises(ValueError, match=r"a bias: got \(2,\), wanted \(4,\)"):
        head_constants(Heads(**places, bias=True), 10, bias=bias[1:] * 2)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"head_dim": 7}, "heads of 7"),
        ({"rot": 3}, "of which 3 rotate"),
        ({"rot": 10}, "of which 10 rotate"),
        ({"rot": 4, "q_table": True}, "a table for q with 4 of 8"),
        ({"norm": "both"}, "norm 'both'"),
        ({"norm": "row", "v_norm": True}, "norm 'row' with v_norm True"),
        ({"kv_heads": 0}, "0 key heads, with k from 32"),
        ({"k_off": None}, "1 key heads, with k from None"),
    ],
    ids=str,
)
def test_heads_that_do_not_exist_are_refused(changes, words):
    places = {"heads": 2, "kv_heads": 1, "head_dim": 8, "rot": 8, "k_off": 32, "v_off": 48}
    with pytest.raises(ValueError, match=words):
        Heads(**places | changes)


@pytest.mark.parametrize("places", [(16, 48), (32, 40), (32, 56), (48, 32)], ids=str)
def test_parts_that_overlap_are_refused(plan, places):
    lab = Lab(plan)
    ids, table = lab.input(np.zeros(2, np.int32)), lab.input(rope_table(np.ones(4), 9))
    q, cache, qkv = lab.rows(2, 32), lab.rows(4, 16), lab.input(normal(2, 64))
    heads = Heads(4, 2, 8, 8, *places)
    with lab.section, pytest.raises(ValueError, match="do not hold"):
        rope_forward(plan, q.tensor, cache.tensor, cache.tensor, qkv, ids, ids, table, rows=2, heads=heads)


def test_a_backward_with_norms_wants_qkv(plan):
    lab = Lab(plan)
    ids, table = lab.input(np.zeros(2, np.int32)), lab.input(rope_table(np.ones(4), 9))
    heads = Heads(4, 0, 8, 8, norm="head")
    dq, dqkv, wrong = lab.rows(2, 32), lab.rows(2, 32), lab.input(normal(2, 16))
    with lab.section, pytest.raises(ValueError, match="qkv"):
        rope_backward(plan, dqkv.tensor, dq.tensor, None, None, ids, None, table, rows=2, heads=heads, qkv=wrong)
