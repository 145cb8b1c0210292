"""Norm, clipping, AdamW and step bookkeeping against the float64 reference; bad steps change nothing."""

import numpy as np
import pytest
from oplab import check, normal

from lorawgpu.doctor.optimizer import adamw
from lorawgpu.ops.adamw import GROUP, adamw_step, grad_norm, partial_count
from lorawgpu.ops.step import adam_scales, pack_step, step_buffer
from lorawgpu.ops.step_state import StepState, begin_step, end_step, state_buffer, unpack_state

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "max_norm": 1.0}
SIZES = (2 * GROUP + 36, 64, 4)


@pytest.mark.parametrize("max_norm", [1.0, 1e9, 0.0], ids=["clipped", "not reached", "off"])
def test_matches_reference(plan, max_norm):
    check(plan, adamw, *((t, max_norm, *SIZES) for t in (1, 2, 3, 1000)))


class Optimizer:
    """The update section over three pieces of flat buffers, step after step."""

    def __init__(self, plan):
        self.plan, self.device = plan, plan.device
        self.weights = [self.device.upload(normal(n)) for n in SIZES]
        self.m, self.v, self.grads = ([self.device.tensor((n,)) for n in SIZES] for _ in range(3))
        self.norm, self.partials = (self.device.tensor((n,)) for n in (1, partial_count(SIZES)))
        self.step, self.state = step_buffer(self.device), state_buffer(self.device)
        with plan.section("begin"):
            begin_step(plan, self.state, self.device.tensor((2,), "u32"))
        with plan.section("update"):
            grad_norm(plan, self.norm, self.partials, self.grads, self.step, self.state, record_id=40)
            for w, m, v, g in zip(self.weights, self.m, self.v, self.grads, strict=True):
                adamw_step(plan, w, m, v, g, self.norm, self.step, self.state, **ADAM)
            end_step(plan, self.state)

    def run(self, t, grads):
        m_scale, v_scale = adam_scales(t, ADAM["beta1"], ADAM["beta2"])
        self.device.write(self.step, pack_step(lr=0.1, inv_targets=1.0, m_scale=m_scale, v_scale=v_scale))
        self.plan.run("begin")
        for tensor, g in zip(self.grads, grads, strict=True):
            self.device.write(tensor, g)
        self.plan.run("update")
        return unpack_state(self.device.read(self.state))

    def read(self):
        return [self.device.read(t) for t in (*self.weights, *self.m, *self.v)]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_step_changes_nothing(plan, value):
    opt = Optimizer(plan)
    good = [normal(n) for n in SIZES]
    bad = [g.copy() for g in good]
    bad[1][63] = value
    assert opt.run(1, good) == StepState(False, 0, 0, None, 1)
    before = opt.read()
    assert opt.run(2, bad) == StepState(True, 1, 1, 40, 2)
    assert opt.run(3, bad) == StepState(True, 2, 2, 40, 3)
    assert all(np.array_equal(a, b) for a, b in zip(opt.read(), before, strict=True))
    assert opt.run(4, good) == StepState(False, 0, 2, 40, 4)  # and the next good one works again
    assert not any(np.array_equal(a, b) for a, b in zip(opt.read(), before, strict=True))


def test_pieces_of_another_length_are_refused(plan):
    opt = Optimizer(plan)
    tensors = opt.weights[2], opt.m[2], opt.v[2], opt.grads[1], opt.norm, opt.step, opt.state
    with plan.section("x"), pytest.raises(ValueError, match=r"grads .*got f32 \[64\], wanted f32 \[4\]"):
        adamw_step(plan, *tensors, **ADAM)
