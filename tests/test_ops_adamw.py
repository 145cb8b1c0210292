"""Norm, clip, AdamW and the bookkeeping of steps, step after step, against the float64 reference."""

import numpy as np
import pytest
from oplab import POISON, normal

from lorawgpu.ops.adamw import GROUP, adamw_step, grad_norm, partial_count
from lorawgpu.ops.step import adam_scales, pack_step, step_buffer
from lorawgpu.ops.step_state import StepState, begin_step, end_step, pack_state, state_buffer, unpack_state
from lorawgpu.reference import adamw as reference

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
SIZES = (2 * GROUP + 36, 64, 4)


class Optimizer:
    """The update section over three pieces of flat buffers."""

    def __init__(self, plan, max_norm, sizes=SIZES):
        self.plan, self.device = plan, plan.device
        upload = self.device.upload
        self.sizes = sizes
        self.weights = [upload(normal(n)) for n in sizes]
        self.m, self.v, self.grads = ([self.device.tensor((n,)) for n in sizes] for _ in range(3))
        self.norm = upload(np.full(2, POISON, np.float32))
        self.partials = self.device.tensor((partial_count(sizes),))
        self.step, self.state = step_buffer(self.device), state_buffer(self.device)
        self.total = self.device.tensor((2,), "u32")
        with plan.section("begin"):
            begin_step(plan, self.state, self.total)
        with plan.section("update"):
            grad_norm(plan, self.norm.view(0, (1,)), self.partials, self.grads, self.step, self.state, record_id=40)
            for w, m, v, g in zip(self.weights, self.m, self.v, self.grads, strict=True):
                adamw_step(plan, w, m, v, g, self.norm, self.step, self.state, max_norm=max_norm, **ADAM)
            end_step(plan, self.state)

    def run(self, t, grads, lr, targets):
        m_scale, v_scale = adam_scales(t, ADAM["beta1"], ADAM["beta2"])
        self.device.write(self.step, pack_step(lr=lr, inv_targets=1 / targets, m_scale=m_scale, v_scale=v_scale))
        self.plan.run("begin")
        for tensor, g in zip(self.grads, grads, strict=True):
            self.device.write(tensor, g)
        self.plan.run("update")

    def read(self, tensors):
        return [self.device.read(t) for t in tensors]


def reference_run(weights, all_grads, lr, targets, max_norm):
    """All steps in float64 -> weights, m, v, the last norm."""
    p = [w.astype(np.float64) for w in weights]
    m, v = [np.zeros(w.shape) for w in p], [np.zeros(w.shape) for w in p]
    for t, grads in enumerate(all_grads, 1):
        g = [x.astype(np.float64) / targets for x in grads]
        norm = reference.grad_norm(g)
        clip = reference.clip_scale(norm, max_norm) if max_norm > 0 else 1.0
        for i in range(len(p)):
            p[i], m[i], v[i] = reference.adamw_update(
                p[i], clip * g[i], m[i], v[i], t, lr, ADAM["beta1"], ADAM["beta2"], ADAM["eps"], ADAM["weight_decay"]
            )
    return p, m, v, norm


@pytest.mark.parametrize("max_norm", [1.0, 1e9, 0.0], ids=["clipped", "not reached", "off"])
def test_matches_reference(plan, max_norm):
    opt = Optimizer(plan, max_norm)
    start = opt.read(opt.weights)
    all_grads = [[normal(n, seed=10 * t + i) * 50 for i, n in enumerate(SIZES)] for t in range(4)]
    for t, grads in enumerate(all_grads, 1):
        opt.run(t, grads, 0.02, 37)
    p, m, v, norm = reference_run(start, all_grads, 0.02, 37, max_norm)
    got_norm = opt.device.read(opt.norm)
    np.testing.assert_allclose(got_norm[0], norm, rtol=1e-6)  # a float32 sum of 33000 squares, in trees
    assert got_norm[1] == POISON
    for got, want in ((opt.weights, p), (opt.m, m), (opt.v, v)):
        for a, b in zip(opt.read(got), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=4e-6, atol=1e-6)  # four steps of float32; weights are near 1
    assert unpack_state(opt.device.read(opt.state)) == StepState(False, 0, 0, None, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_step_changes_nothing(plan, value):
    opt = Optimizer(plan, 1.0)
    good = [normal(n) for n in SIZES]
    bad = [g.copy() for g in good]
    bad[1][63] = value
    opt.run(1, good, 0.1, 1)
    before = [opt.read(x) for x in (opt.weights, opt.m, opt.v)]
    for t in (2, 3):
        opt.run(t, bad, 0.1, 1)
    assert unpack_state(opt.device.read(opt.state)) == StepState(True, 2, 2, 40, 3)
    for tensors, old in zip((opt.weights, opt.m, opt.v), before, strict=True):
        for a, b in zip(opt.read(tensors), old, strict=True):
            assert np.array_equal(a, b)
    opt.run(4, good, 0.1, 1)  # and the next good one works again
    assert unpack_state(opt.device.read(opt.state)) == StepState(False, 0, 2, 40, 4)
    assert not np.array_equal(opt.device.read(opt.weights[0]), before[0][0])


def test_two_runs_give_the_same_bits(device, kernels):
    from lorawgpu.gpu import Plan

    results = []
    for _ in range(2):
        opt = Optimizer(Plan(device, kernels), 1.0)
        opt.run(1, [normal(n, seed=5) for n in SIZES], 0.1, 3)
        results.append([x.tobytes() for x in (*opt.read(opt.weights), opt.device.read(opt.norm))])
    assert results[0] == results[1]


def test_begin_clears_the_flag_and_the_loss(plan):
    opt = Optimizer(plan, 1.0)
    opt.device.write(opt.total, np.array([3, 4], np.uint32))
    opt.device.write(opt.state, pack_state(StepState(True, 2, 5, 7, 9)))
    plan.run("begin")
    assert not opt.device.read(opt.total).any()
    assert unpack_state(opt.device.read(opt.state)) == StepState(False, 2, 5, 7, 9)


def test_pieces_of_another_length_are_refused(plan):
    opt = Optimizer(plan, 1.0)
    with plan.section("x"), pytest.raises(ValueError, match=r"grads .*got f32 \[64\], wanted f32 \[4\]"):
        adamw_step(
            plan, opt.weights[2], opt.m[2], opt.v[2], opt.grads[1], opt.norm, opt.step, opt.state, max_norm=1.0, **ADAM
        )
