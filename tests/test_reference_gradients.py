"""Every backward of the reference against central differences; wrong ones must fail the check."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from gradcheck import check_gradients, wrong_backwards

from lorawgpu.reference.attention import (
    attention_apply_backward,
    attention_apply_forward,
    attention_backward,
    attention_forward,
    attention_scores_backward,
    attention_scores_forward,
    attention_softmax_backward,
    attention_softmax_forward,
)
from lorawgpu.reference.cross_entropy import cross_entropy_backward, cross_entropy_forward, head_loss
from lorawgpu.reference.dense import dense_backward, dense_forward
from lorawgpu.reference.dropout import dropout_mask, dropout_step_key
from lorawgpu.reference.gate import gate_backward, gate_forward
from lorawgpu.reference.gather import gather_backward, gather_forward
from lorawgpu.reference.lora import lora_backward, lora_forward
from lorawgpu.reference.quantize import quantize_backward, quantize_forward, quantize_residual
from lorawgpu.reference.rmsnorm import rmsnorm_add_backward, rmsnorm_add_forward, rmsnorm_backward, rmsnorm_forward
from lorawgpu.reference.rope import (
    heads_backward,
    heads_forward,
    rope_backward,
    rope_forward,
    rope_inv_freq,
    rope_tables,
)
from lorawgpu.reference.softcap import softcap_backward, softcap_forward
from lorawgpu.reference.ternary import bitlinear_backward
from lorawgpu.reference.token_rows import columns_backward, columns_forward, rows_backward, rows_forward


@dataclass
class GradientCase:
    """One op: forward(**inputs) -> y, backward(dy, **inputs) -> gradients, and faulty backwards that lack a term."""

    forward: object
    backward: object
    inputs: dict
    missing: dict = field(default_factory=dict)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def rmsnorm_case():
    weight, eps = normal(13), 1e-5

    def backward(dy, x):
        return {"x": rmsnorm_backward(dy, x, weight, rmsnorm_forward(x, weight, eps)[1])}

    def no_mean_term(dy, x):
        return {"x": dy * weight * rmsnorm_forward(x, weight, eps)[1][:, None]}

    return GradientCase(
        lambda x: rmsnorm_forward(x, weight, eps)[0], backward, {"x": normal(3, 13)}, {"mean term": no_mean_term}
    )


def rmsnorm_add_case():
    weight, eps, scale = normal(13), 1e-5, 0.3

    def backward(dout, residual, x, scale=scale):
        rstd = rmsnorm_forward(x, weight, eps)[1]
        return dict(zip(("residual", "x"), rmsnorm_add_backward(dout, x, weight, rstd, scale), strict=True))

    return GradientCase(
        lambda residual, x: rmsnorm_add_forward(residual, x, weight, eps, scale)[0],
        backward,
        {"residual": normal(3, 13), "x": normal(3, 13, seed=1)},
        {"scale": lambda dout, **inputs: backward(dout, **inputs, scale=1.0)},
    )


def bitlinear_case():
    """Quantizer and ternary product together, using the quantizer's surrogate with its residual held."""
    x, T, w = normal(3, 8), np.random.default_rng(0).integers(-1, 2, (10, 8)), np.repeat([0.7, 0.02], 5)
    residual = quantize_residual(x)

    def backward(dy, x):
        return {"x": quantize_backward(bitlinear_backward(dy, T, w))}

    return GradientCase(
        lambda x: (x + residual) @ T.T * w,
        backward,
        {"x": x},
        {
            "weight scale": lambda dy, x: {"x": bitlinear_backward(dy, T, 1.0)},
            "activation scale kept": lambda dy, x: {
                "x": bitlinear_backward(dy, T, w) * quantize_forward(x)[1][:, None]
            },
        },
    )


def dense_case():
    weight = normal(5, 7)
    return GradientCase(
        lambda x: dense_forward(x, weight), lambda dy, x: {"x": dense_backward(dy, weight)}, {"x": normal(3, 7)}
    )


def lora_case(p):
    mask = dropout_mask(dropout_step_key(1, 2, 3), 0, 0, 4, 7, p) if p else None
    scale = 0.5

    def forward(x, A, B):
        return lora_forward(x, A, B, scale, mask, p)[0]

    def backward(dy, x, A, B, mask=mask):
        u = lora_forward(x, A, B, scale, mask, p)[1]
        return dict(zip(("x", "A", "B"), lora_backward(dy, x, u, A, B, scale, mask, p), strict=True))

    missing = {"scale": lambda dy, **inputs: {name: g / scale for name, g in backward(dy, **inputs).items()}}
    if p:
        missing["mask"] = lambda dy, **inputs: backward(dy, mask=None, **inputs)
    return GradientCase(forward, backward, {"x": normal(4, 7), "A": normal(3, 7), "B": normal(5, 3)}, missing)


def rope_case():
    cos, sin = rope_tables([0, 5, 2], rope_inv_freq(100.0, 6))
    return GradientCase(
        lambda x: rope_forward(x, cos, sin),
        lambda dy, x: {"x": rope_backward(dy, cos, sin)},
        {"x": normal(3, 12)},
        {"inverse": lambda dy, x: {"x": rope_forward(dy, cos, sin)}},
    )


def heads_case(whole):
    """Three heads of 8, of which 6 dimensions rotate: a bias, a norm of each head or of the whole row, scales."""
    by_position, weight = np.array([[1.0], [1.3], [0.7]]), normal(24 if whole else 8)
    tables = [by_position * table for table in rope_tables([0, 5, 2], rope_inv_freq(100.0, 6))]
    options = {"bias": normal(24, seed=1), "weight": weight, "eps": 0.1, "tables": tables, "scale": 0.3}

    def without(**changes):
        return lambda dy, x: {"x": heads_backward(dy, x, 8, **(options | changes))}

    return GradientCase(
        lambda x: heads_forward(x, 8, **options),
        without(),
        {"x": normal(3, 24)},
        {
            "bias": without(bias=0.0),
            "norm": without(weight=None),
            "eps": without(eps=0.0),
            "rotation": without(tables=None),
            "scale": without(scale=1.0),
        },
    )


def values_from_keys_case():
    """Keys and values made from one projection: its gradient has both parts."""
    tables, ones = rope_tables([0, 5, 2], rope_inv_freq(100.0, 6)), np.ones(6)
    k_options, v_options = {"weight": normal(6), "eps": 0.1, "tables": tables}, {"weight": ones, "eps": 0.1}

    def backward(dy, x, parts=(1, 1)):
        dk, dv = np.split(dy, 2, axis=-1)
        return {
            "x": parts[0] * heads_backward(dk, x, 6, **k_options) + parts[1] * heads_backward(dv, x, 6, **v_options)
        }

    return GradientCase(
        lambda x: np.concatenate([heads_forward(x, 6, **k_options), heads_forward(x, 6, **v_options)], axis=-1),
        backward,
        {"x": normal(3, 12)},
        {"keys": lambda dy, x: backward(dy, x, (0, 1)), "values": lambda dy, x: backward(dy, x, (1, 0))},
    )


# Three queries on a cache of six slots: a sequence of one, then two rows of another with history; slot 5 is unused.
ROWS = {"slot": np.array([0, 3, 4]), "kv_start": np.array([0, 1, 1])}
SHAPE = {"n_heads": 4, "n_kv_heads": 2, "scale": 0.4}


def qkv():
    return {"q": normal(3, 20), "k": normal(6, 10, seed=1), "v": normal(6, 10, seed=2)}


def chain_case(window=None, softcap=None):
    options = {**SHAPE, "softcap": softcap}
    seen = {**ROWS, **options, "window": window}

    def forward(q, k, v):
        attn, _ = attention_softmax_forward(attention_scores_forward(q, k, **seen))
        return attention_apply_forward(attn, v, 2)

    def backward(dout, q, k, v, softmax_backward=attention_softmax_backward, seen=seen):
        attn, _ = attention_softmax_forward(attention_scores_forward(q, k, **seen))
        dattn, dv = attention_apply_backward(dout, attn, v, 2)
        dq, dk = attention_scores_backward(softmax_backward(dattn, attn), q, k, **options)
        return {"q": dq, "k": dk, "v": dv}

    def first_head_only(dout, q, k, v):
        grads = backward(dout, q, k, v)
        dout = dout.reshape(3, 2, 2, 5) * np.array([1.0, 0.0])[:, None]  # a group's second head does not reach dv
        return {**grads, "v": backward(dout.reshape(3, 20), q, k, v)["v"]}

    def history_dropped(dout, q, k, v):
        grads = backward(dout, q, k, v)
        new = np.isin(np.arange(6), ROWS["slot"])[:, None]  # only keys of the query rows themselves get a gradient
        return {**grads, "k": grads["k"] * new, "v": grads["v"] * new}

    missing = {
        "softmax sum": lambda dout, **x: backward(dout, **x, softmax_backward=lambda dattn, attn: attn * dattn),
        "group sum": first_head_only,
        "history": history_dropped,
    }
    if window:
        missing["window"] = lambda dout, **x: backward(dout, **x, seen={**seen, "window": None})
    if softcap:

        def no_softcap(dout, q, k, v):
            attn, _ = attention_softmax_forward(attention_scores_forward(q, k, **seen))
            dattn, dv = attention_apply_backward(dout, attn, v, 2)
            dq, dk = attention_scores_backward(attention_softmax_backward(dattn, attn), q, k, **SHAPE)
            return {"q": dq, "k": dk, "v": dv}

        missing["softcap slope"] = no_softcap
    return GradientCase(forward, backward, qkv(), missing)


def flash_case(window=None, softcap=None):
    options = {**ROWS, **SHAPE, "window": window, "softcap": softcap}

    def backward(dout, q, k, v, delta=1.0):
        out, lse = attention_forward(q, k, v, **options)
        return dict(zip("qkv", attention_backward(dout, q, k, v, delta * out, lse, **options), strict=True))

    return GradientCase(
        lambda q, k, v: attention_forward(q, k, v, **options)[0],
        backward,
        qkv(),
        {"delta": lambda dout, **x: backward(dout, **x, delta=0.0)},
    )


def gate_case(act, scale=1.0):
    def forward(g, u):
        return gate_forward(g, u, act, scale)

    def backward(dm, g, u):
        return dict(zip("gu", gate_backward(dm, g, u, act, scale), strict=True))

    def without_u(dm, g, u):
        return {**backward(dm, g, u), "g": backward(dm, g, np.ones_like(u))["g"]}

    def half_slope(dm, g, u):  # relu2 without its 2; the others, g times a sigmoid, without the sigmoid's slope
        slope = np.maximum(g, 0.0) if act == "relu2" else gate_forward(g, 1 / g, act)
        return {**backward(dm, g, u), "g": scale * dm * u * slope}

    missing = {"u in dg": without_u, "part of the slope": half_slope}
    if scale != 1.0:
        missing["scale"] = lambda dm, g, u: dict(zip("gu", gate_backward(dm, g, u, act), strict=True))
    return GradientCase(forward, backward, {"g": normal(3, 7), "u": normal(3, 7, seed=1)}, missing)


def gather_case():
    rows = np.array([4, 1])
    return GradientCase(
        lambda x: gather_forward(x, rows),
        lambda dy, x: {"x": gather_backward(dy, rows, 5)},
        {"x": normal(5, 3)},
        {"last row": lambda dy, x: {"x": gather_backward(dy[:1], rows[:1], 5)}},
    )


def token_rows_case():
    """A repeated id, one without a row, and a row of which no id is there."""
    ids, row_of = np.array([2, 0, 2, 3]), np.array([-1, 2, 0, 1])

    def backward(dy, x, rows):
        own = (row_of[ids] >= 0)[:, None]
        return {"x": np.where(own, 0, dy), "rows": rows_backward(dy, ids, row_of, 3, 1.5)}

    def first_only(dy, x, rows):
        return backward(dy * np.array([1, 1, 0, 1])[:, None], x, rows) | {"x": backward(dy, x, rows)["x"]}

    def unscaled(dy, x, rows):
        return backward(dy, x, rows) | {"rows": rows_backward(dy, ids, row_of, 3)}

    return GradientCase(
        lambda x, rows: rows_forward(x, ids, row_of, rows, 1.5),
        backward,
        {"x": normal(4, 3), "rows": normal(3, 3, seed=1)},
        {"repeats": first_only, "the scale": unscaled},
    )


def token_columns_case():
    ids = np.array([4, 1])
    return GradientCase(
        lambda z, own: columns_forward(z, ids, own),
        lambda dy, z, own: dict(zip(("z", "own"), columns_backward(dy, ids), strict=True)),
        {"z": normal(3, 6), "own": normal(3, 2, seed=1)},
        {"the base's columns": lambda dy, z, own: {"z": dy, "own": dy[:, ids]}},
    )


def cross_entropy_case(weights=1.0):
    targets = np.array([2, 0, 2])

    def backward(dy, x):
        lse = cross_entropy_forward(x, targets)[1]
        return {"x": dy[:, None] * cross_entropy_backward(x, targets, lse, weights)}

    def no_target(dy, x):
        return {"x": dy[:, None] * np.exp(x - cross_entropy_forward(x, targets)[1][:, None])}

    return GradientCase(
        lambda x: cross_entropy_forward(x, targets, weights)[0],
        backward,
        {"x": normal(3, 5)},
        {"target": no_target, "sum, not mean": lambda dy, x: {"x": backward(dy, x)["x"] / 3}},
    )


def softcap_case():
    cap = 1.5
    return GradientCase(
        lambda z: softcap_forward(z, cap),
        lambda dy, z: {"z": softcap_backward(dy, softcap_forward(z, cap), cap)},
        {"z": normal(3, 5)},
        {"slope": lambda dy, z: {"z": dy}, "cap in the slope": lambda dy, z: {"z": dy * (1 - np.tanh(z) ** 2)}},
    )


def head_case():
    """Chunks of 2 over 5 rows: the last one is partial."""
    weight, targets = normal(11, 6), np.array([2, 0, 10, 2, 7])
    return GradientCase(
        lambda x: head_loss(x, weight, targets, 2)[0].sum(),
        lambda dy, x: {"x": dy * head_loss(x, weight, targets, 2)[1]},
        {"x": normal(5, 6)},
    )


CASES = {
    "rmsnorm": rmsnorm_case(),
    "rmsnorm added, scaled": rmsnorm_add_case(),
    "bitlinear": bitlinear_case(),
    "dense": dense_case(),
    "lora": lora_case(0.0),
    "lora dropout": lora_case(0.3),
    "rope": rope_case(),
    "heads": heads_case(whole=False),
    "heads, norm of the row": heads_case(whole=True),
    "values from keys": values_from_keys_case(),
    "attention chain": chain_case(),
    "attention chain softcap": chain_case(softcap=1.5),
    "attention chain window": chain_case(window=3),
    "attention flash": flash_case(),
    "attention flash softcap": flash_case(softcap=1.5),
    "attention flash window": flash_case(window=3),
    "relu2": gate_case("relu2"),
    "silu": gate_case("silu"),
    "gelu_tanh": gate_case("gelu_tanh"),
    "gate, scaled": gate_case("silu", 0.22),
    "gather": gather_case(),
    "token rows": token_rows_case(),
    "token columns": token_columns_case(),
    "cross entropy": cross_entropy_case(),
    "cross entropy, weighted": cross_entropy_case(np.array([0.5, -2.0, 3.0])),
    "softcap": softcap_case(),
    "head": head_case(),
}


def wrong(case):
    yield from wrong_backwards(case.backward, case.inputs)
    yield from case.missing.items()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_backward_agrees_with_central_differences(case):
    check_gradients(case.forward, case.backward, case.inputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_wrong_backwards_are_caught(case):
    for label, backward in wrong(case):
        with pytest.raises(AssertionError):
            check_gradients(case.forward, backward, case.inputs)
            pytest.fail(f"the check accepts a backward with a fault: {label}", pytrace=False)


def test_check_rejects_no_gradient_and_nan():
    for backward in (lambda dy, x: {}, lambda dy, x: {"x": np.full_like(x, np.nan)}):
        with pytest.raises(AssertionError):
            check_gradients(lambda x: x * x, backward, {"x": normal(2, 2)})
