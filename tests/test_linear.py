"""Linear layers with adapters on the GPU: forward and all gradients against reference/lora.py; exact dropout bits."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from gradcheck import relative_error
from oplab import Lab, limited, normal, pad
from tiny_model import random_adapter, tiny_config

from lorawgpu.doctor.matmul import MATRICES, quantized
from lorawgpu.families.modules import LINEAR_MODULES
from lorawgpu.gpu import Workspace, padded
from lorawgpu.lora.layout import AdapterLayout
from lorawgpu.lora.peft_config import LoraConfig
from lorawgpu.ops.dropout import dropout_add, dropout_forward
from lorawgpu.ops.linear import linear_backward, linear_forward
from lorawgpu.ops.lora import lora_back, lora_backward, lora_down, lora_dropout_back, lora_up
from lorawgpu.ops.step import pack_step, step_buffer
from lorawgpu.reference import lora as reference
from lorawgpu.reference.dropout import MODULES, dropout_mask, dropout_step_key
from lorawgpu.reference.quantize import dequantize, quantize_forward
from lorawgpu.weights.device import upload_weight

FLOAT32 = 3e-6  # float32 sums of some hundred terms err by sqrt(k) x 6e-8; a lost term is off by 1e-2
LAYER, KEY, P = 1, dropout_step_key(7, 3, 2), 0.3

STORES = ("f32",), ("ternary",), ("bf16", "f32")  # the matrices of a group in turn

# Ranks below, at and above the 4 they are padded to and the 16 of a tile; scales that differ within a group.
QKV = LoraConfig(3, 6, ("q_proj", "v_proj"), rank_pattern={"v_proj": 21}, alpha_pattern={"q_proj": 5})
CASES = {
    "q, v": ("qkv", QKV),
    "q, k, v of one scale": ("qkv", LoraConfig(8, 4, ("q_proj", "k_proj", "v_proj"))),
    "k": ("qkv", LoraConfig(5, 5, ("k_proj",), use_rslora=True)),
    "o": ("o", LoraConfig(16, 32, ("o_proj",))),
    "gate, up": ("gate_up", LoraConfig(2, 8, ("gate_proj", "up_proj"), rank_pattern={"up_proj": 9})),
    "down": ("down", LoraConfig(1, 8, ("down_proj",))),
}


def step_of(device):
    step = step_buffer(device)
    device.write(step, pack_step(key=KEY))
    return step


class Projection:
    """One fused projection of a layer: its weights on the host, its adapters in flat buffers, `rows` of input."""

    def __init__(self, plan, lora, group, rows, stores=("f32",), binding=None, **sizes):
        self.plan, self.device, self.rows = plan, plan.device, rows
        odd = {"hidden": 123, "width": 200, "heads": 6, "kv_heads": 2}
        config = tiny_config(**odd | sizes)
        layout = AdapterLayout(lora, config)
        self.group, self.lora, self.size = layout.groups[LAYER, group], lora, layout.size
        self.modules = config.group_modules(LAYER, group)
        shapes = config.layers[LAYER].group_shapes(group)
        self.outs = [out for out, _ in shapes]
        self.width = shapes[0][1]
        self.tensors = random_adapter(lora, config)
        self.layout, self.lab, self.work = layout, Lab(plan), Workspace(plan.device)
        self.columns = np.concatenate(
            [start + np.arange(n) for start, n in zip([0, *self.group.columns], self.outs, strict=False)]
        )
        self.params = self.lab.input(layout.flatten(self.tensors))
        device = limited(self.device, binding) if binding else self.device
        made = [
            MATRICES[store](n, self.width, i)
            for i, (store, n) in enumerate(zip(cycle(stores), self.outs, strict=False))
        ]
        self.weights = [values.astype(np.float64) for _, values in made]
        self.weight = upload_weight(device, [matrix for matrix, _ in made], "weight")

    def adapters(self):
        """(index of the linear layer, A, B, scale, mask) of each path."""
        for path in self.group.paths:
            a, b = self.tensors[path.a.name].astype(np.float64), self.tensors[path.b.name].astype(np.float64)
            mask = dropout_mask(KEY, LAYER, MODULES.index(path.module), self.rows, self.width, P)
            yield path, a, b, self.lora.scale(self.modules[path.index]), mask

    def fused(self, parts):
        """Outputs of all linear layers -> one array with padding, as on the GPU."""
        return np.concatenate([pad(p) for p in parts], axis=1)

    def given(self, x):
        """The input of the base product: x, or its int8 words and scales."""
        if not self.weight.int8_input:
            return self.lab.padded(x), None
        words, qscale, _ = quantized(pad(x))
        return self.lab.input(words), self.lab.input(qscale)

    def forward(self, x, p):
        """Reference output of each linear layer, and u of each path."""
        source = dequantize(*quantize_forward(x)) if self.weight.int8_input else x.astype(np.float64)
        ys, us = [source @ w.T for w in self.weights], []
        for path, a, b, scale, mask in self.adapters():
            y, u = reference.lora_forward(x.astype(np.float64), a, b, scale, mask if p else None, p)
            ys[path.index] += y
            us.append(u)
        return ys, us


def unpadded(fused, columns):
    """The real columns of a fused output; the others must be zero."""
    assert not np.delete(fused, columns, axis=1).any(), "the padding of a row is not zero"
    return fused[:, columns]


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("stores", STORES, ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_forward(plan, case, stores, p):
    group, lora = CASES[case]
    t = Projection(plan, lora, group, rows=37, stores=stores)
    x, residual = normal(37, t.width), normal(37, sum(t.outs), seed=9)
    ys, us = t.forward(x, p)
    shifted = t.fused(np.split(residual, np.cumsum(t.outs)[:-1], axis=1))
    h, y = t.lab.output(37, t.group.rank), t.lab.output(37, t.weight.rows)
    source, qscale = t.given(x)
    shape = {"rows": 37, "width": t.width, "step": step_of(t.device), "p": p}
    with t.lab.section:
        lora_down(plan, t.work, h.tensor, t.lab.padded(x), t.group, t.params, **shape)
        linear_forward(
            plan,
            y.tensor,
            source,
            t.weight,
            rows=37,
            qscale=qscale,
            lora=lora_up(t.group, h.tensor, t.params),
            residual=t.lab.input(shifted),
        )
    t.lab.run()
    assert relative_error(unpadded(y.value, t.columns), np.concatenate(ys, axis=1) + residual) < FLOAT32
    for (path, a, *_, scale, _), u in zip(t.adapters(), us, strict=True):
        assert relative_error(h.value[:, path.h : path.h + len(a)], scale * u) < FLOAT32


def run_backward(t, x, dy, grads, p, step):
    """Record and run h, dh and all gradients; dx and the gradients are outputs."""
    rows, lab, plan = t.rows, t.lab, t.plan
    h, dh = lab.output(rows, t.group.rank), lab.output(rows, t.group.rank)
    dx, flat = lab.output(rows, padded(t.width)), lab.output(t.size, initial=grads)
    shape = {"rows": rows, "width": t.width, "step": step, "p": p}
    source, fused = lab.padded(x), lab.input(dy)
    with lab.section:
        lora_down(plan, t.work, h.tensor, source, t.group, t.params, **shape)
        lora_backward(
            plan, t.work, dh.tensor, fused, h.tensor, source, t.group, t.params, flat.tensor.view(0, (t.size,)), **shape
        )
        back = None if p else lora_back(t.group, dh.tensor, t.params)
        linear_backward(plan, t.work, dx.tensor, fused, t.weight, rows=rows, lora=back)
        if p:
            lora_dropout_back(plan, t.work, dx.tensor, dh.tensor, t.group, t.params, **shape)
    lab.run()
    return dx.value, t.layout.unflatten(flat.value)


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("stores", STORES, ids=" ".join)
@pytest.mark.parametrize("case", CASES)
def test_backward(plan, case, stores, p):
    check_backward(Projection(plan, CASES[case][1], CASES[case][0], rows=36, stores=stores), p)


@pytest.mark.parametrize("p", [0.0, P])
def test_long_reductions_are_split(plan, p):
    """With over 1024 rows, dA and dB are split."""
    check_backward(Projection(plan, QKV, "qkv", rows=1100), p)


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("stores", STORES[:2], ids=" ".join)
@pytest.mark.parametrize("group, parts", [("down", {1, 4}), ("gate_up", {1, 4})])
def test_long_rows_are_split(plan, group, parts, stores, p):
    """h over 1107 inputs and dh over 1107 outputs are sums of four parts, whose lengths are not whole tiles."""
    check_backward(Projection(plan, CASES["down" if group == "down" else "gate, up"][1], group, 36, stores,
                              width=1107), p)  # fmt: skip
    assert {r.grid[2] for r in plan.sections["lab"] if "matmul" in r.label} >= parts


def test_parts_of_gradients_fit_a_binding(plan, monkeypatch):
    t = Projection(plan, LoraConfig(64, 64, ("q_proj", "k_proj", "v_proj")), "qkv", rows=640)
    span = t.group.span(t.params).nbytes
    monkeypatch.setitem(plan.device.limits, "max-storage-buffer-binding-size", padded(4 * span, 256))
    check_backward(t, 0.0)
    assert [r.grid[2] for r in plan.sections["lab"] if "lora_dA/" in r.label] == [4]


def test_parts_of_gradients_are_added_at_once(plan):
    check_backward(Projection(plan, QKV, "qkv", rows=1100), 0.0)
    sums = [r.label for r in plan.sections["lab"] if "lora_dA" in r.label and "sum_splits" in r.label]
    assert len(sums) == 1


@pytest.mark.parametrize("group", ["qkv", "gate_up"])
@pytest.mark.parametrize("rows", [36, 520])
def test_linears_of_even_widths_share_their_products(plan, group, rows):
    """With widths of whole tiles, dh and dB of all linear layers of the group take one product each."""
    sizes = {"head_dim": 64, "heads": 4, "kv_heads": 1, "width": 384}
    t = Projection(plan, LoraConfig(6, 9, LINEAR_MODULES), group, rows, **sizes)
    check_backward(t, 0.0)
    labels = [r.label for r in plan.sections["lab"]]
    assert sum("lora_dh/matmul" in label for label in labels) == 1
    assert sum("lora_dB/matmul" in label for label in labels) == 1


def check_backward(t, p):
    rows = t.rows
    x, dys = normal(rows, t.width), [normal(rows, n, seed=10 + i) for i, n in enumerate(t.outs)]
    before = normal(t.size, seed=4)  # gradients of earlier micro-batches, to be added to
    old = t.layout.unflatten(before)
    dx, grads = run_backward(t, x, t.fused(dys), before, p, step_of(t.device))
    expected = sum(dy @ w for dy, w in zip(dys, t.weights, strict=True))
    touched = set()
    for path, a, b, scale, mask in t.adapters():
        kept = (mask, p) if p else (None, 0.0)
        u = reference.lora_forward(x.astype(np.float64), a, b, scale, *kept)[1]
        part, dA, dB = reference.lora_backward(dys[path.index], x, u, a, b, scale, *kept)
        expected = expected + part
        for slot, grad in ((path.a, dA), (path.b, dB)):
            touched.add(slot.name)
            assert relative_error(grads[slot.name], old[slot.name] + grad) < FLOAT32, slot.name
    assert relative_error(dx[:, : t.width], expected) < FLOAT32
    assert not dx[:, t.width :].any(), "the padding of a row is not zero"
    for name in old.keys() - touched:
        assert np.array_equal(grads[name], old[name]), f"{name} belongs to another layer"


@pytest.mark.parametrize("stores", STORES[:2], ids=" ".join)
def test_a_weight_in_parts_gives_the_same_forward_bits(plan, stores):
    """Parts that cut through gate and up do not change a bit of the forward; the backward sums part by part."""
    group, lora = CASES["gate, up"]
    whole = Projection(plan, lora, group, rows=20, stores=stores)
    ternary = whole.weight.int8_input
    line = whole.weight.columns * (1 if ternary else 4)  # bytes: 4 matrix rows a line when ternary
    split = Projection(plan, lora, group, rows=20, stores=stores, binding=16 * line + 256)
    assert len(whole.weight.parts) == 1 and len(split.weight.parts) == (7 if ternary else 26)
    x, h, lab = normal(20, whole.width), normal(20, whole.group.rank, seed=1), Lab(plan)
    dy = whole.fused([normal(20, n, seed=10 + i) for i, n in enumerate(whole.outs)])
    source, qscale = whole.given(x)
    outs = [(lab.output(20, whole.weight.rows), lab.output(20, whole.weight.columns)) for _ in range(2)]
    with lab.section:
        for t, (y, dx) in zip((whole, split), outs, strict=True):
            lora = lora_up(t.group, lab.input(h), t.params)
            linear_forward(plan, y.tensor, source, t.weight, rows=20, qscale=qscale, lora=lora)
            back = lora_back(t.group, lab.input(h), t.params)
            linear_backward(plan, t.work, dx.tensor, lab.input(dy), t.weight, rows=20, lora=back)
    lab.run()
    (y, dx), (y_split, dx_split) = outs
    assert np.array_equal(y.value, y_split.value)
    assert relative_error(dx_split.value, dx.value) < FLOAT32


@pytest.mark.parametrize("rows, width", [(3, 123), (5, 16), (130, 64), (1, 6)])
@pytest.mark.parametrize("layer, module", [(0, "q_proj"), (1, "down_proj"), (29, "v_proj")])
def test_dropout_bits_are_the_references(plan, rows, width, layer, module):
    lab, x, p = Lab(plan), np.abs(normal(rows, width)) + 1, 0.4
    y, z = lab.rows(rows, width), lab.rows(rows, width, initial=pad(x))
    options = {"layer": layer, "module": module, "rows": rows, "width": width, "p": p}
    step = step_of(plan.device)
    with lab.section:
        dropout_forward(plan, y.tensor, lab.padded(x), step, **options)
        dropout_add(plan, z.tensor, lab.padded(x), step, **options)
    lab.run()
    mask = dropout_mask(KEY, layer, MODULES.index(module), rows, width, p)
    assert np.array_equal(y.value[:, :width] != 0, mask)
    assert np.array_equal(y.value, pad(x * mask * np.float32(1 / (1 - p))))
    assert relative_error(z.value, pad(x + x * mask / (1 - p))) < FLOAT32


def test_each_path_of_a_group_has_its_own_mask(plan):
    """q and v see the same input through different masks, as do other steps and layers."""
    masks = [
        dropout_mask(key, layer, MODULES.index(module), 16, 64, 0.5).tobytes()
        for key in (KEY, dropout_step_key(7, 4, 2), dropout_step_key(7, 3, 3), dropout_step_key(8, 3, 2))
        for layer in (0, 1)
        for module in ("q_proj", "v_proj")
    ]
    assert len(set(masks)) == len(masks)


def test_a_lost_scale_is_noticed(plan):
    """Tests the checker: a scale of 1 in one path must fail."""
    t = Projection(plan, QKV, "qkv", rows=12)
    paths = (replace(t.group.paths[0], scale=1.0), *t.group.paths[1:])
    t.group = replace(t.group, paths=paths)
    with pytest.raises(AssertionError):
        check_backward(t, 0.0)
