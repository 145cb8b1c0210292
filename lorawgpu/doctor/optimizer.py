"""Checks of the kernels of an optimizer step against their references: (lab, sizes) -> results; see check.py."""

import numpy as np

from lorawgpu.doctor.lab import normal
from lorawgpu.ops.adamw import adamw_step, grad_norm, partial_count
from lorawgpu.ops.step import adam_scales, pack_step, step_buffer
from lorawgpu.ops.step_state import StepState, begin_step, end_step, pack_state
from lorawgpu.reference import adamw as reference

BETA1, BETA2, ADAM_EPS, DECAY, LR, TARGETS = 0.9, 0.999, 1e-8, 0.01, 0.02, 5


def adamw(lab, t, max_norm, *sizes):
    """Step `t` (from 1) of tensors of these sizes, clipped at `max_norm` unless it is 0."""
    step = step_buffer(lab.device)
    m_scale, v_scale = adam_scales(t, BETA1, BETA2)
    lab.device.write(step, pack_step(lr=LR, inv_targets=1 / TARGETS, m_scale=m_scale, v_scale=v_scale))
    grads = [normal(n) for n in sizes]
    start = [[normal(n, seed=1), 0.1 * normal(n, seed=2), np.abs(normal(n, seed=3))] for n in sizes]
    state, norm, partials = lab.state(), lab.output(1), lab.output(partial_count(sizes))
    ggrads = [lab.input(g) for g in grads]
    outs = [[lab.output(n, initial=array) for array in arrays] for n, arrays in zip(sizes, start, strict=True)]
    grad_norm(lab.plan, norm.exact, partials.exact, ggrads, step, state.exact, record_id=4)
    hyper = {"beta1": BETA1, "beta2": BETA2, "eps": ADAM_EPS, "weight_decay": DECAY, "max_norm": max_norm}
    for tensors, g in zip(outs, ggrads, strict=True):
        adamw_step(lab.plan, *(t.exact for t in tensors), g, norm.exact, step, state.exact, **hyper)

    def results():
        scaled = [g.astype(np.float64) / TARGETS for g in grads]
        want_norm = reference.grad_norm(scaled)
        clip = reference.clip_scale(want_norm, max_norm) if max_norm else 1.0
        found = {"norm": (norm.value, np.array([want_norm])), "state": (state.value, np.zeros(16))}
        for i, (tensors, arrays, g) in enumerate(zip(outs, start, scaled, strict=True)):
            p, m, v = (a.astype(np.float64) for a in arrays)
            wanted = reference.adamw_update(p, clip * g, m, v, t, LR, BETA1, BETA2, ADAM_EPS, DECAY)
            for name, out, want in zip(("p", "m", "v"), tensors, wanted, strict=True):
                found[f"{name} of tensor {i}"] = out.value, want
        return found

    return results


def step_state(lab, which):
    """The begin of a step after a bad one, and the end of a step that is bad or good."""
    bad = which == "bad"
    states = StepState(True, 2, 5, 7, 9), StepState(bad, 2, 5, 7, 9)
    begun, ended = (lab.output(16, initial=pack_state(state), dtype="u32") for state in states)
    total = lab.output(2, initial=[3, 4], dtype="u32")
    begin_step(lab.plan, begun.exact, total.exact)
    end_step(lab.plan, ended.exact)

    def results():
        after = StepState(True, 3, 6, None, 10) if bad else StepState(False, 0, 5, 7, 10)
        return {
            "begun": (begun.value, pack_state(StepState(False, 2, 5, 7, 9))),
            "ended": (ended.value, pack_state(after)),
            "total": (total.value, np.zeros(2)),
        }

    return results
