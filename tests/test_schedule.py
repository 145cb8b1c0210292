"""The learning rate of every step against transformers' published formulas, and Adam's bias corrections."""

import math
from fractions import Fraction

import pytest

from lorawgpu.config.schema import TrainConfig
from lorawgpu.ops.step import adam_scales
from lorawgpu.optim.schedule import Schedule, schedule_of

TOTAL, WARMUP, PEAK = 20, 4, 2e-4


def published(kind: str, step: int) -> float:
    """`get_scheduler(kind)`'s factor, typed from transformers/optimization.py."""
    if step < WARMUP:
        return step / max(1, WARMUP)
    progress = (step - WARMUP) / max(1, TOTAL - WARMUP)
    return {
        "constant": 1.0,
        "linear": max(0.0, (TOTAL - step) / max(1, TOTAL - WARMUP)),
        "cosine": max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))),
    }[kind]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_every_step_follows_the_published_formula(kind):
    schedule = Schedule(kind, PEAK, TOTAL, WARMUP)
    for step in range(TOTAL + 1):
        # 1e-15 of the peak: a few roundings of float64
        assert schedule.lr(step) == pytest.approx(PEAK * published(kind, step), abs=1e-15 * PEAK, rel=1e-14)


def test_values_by_hand():
    cosine = Schedule("cosine", 1.0, 10, 2)
    assert [cosine.lr(s) for s in (0, 1, 2)] == [0.0, 0.5, 1.0]
    assert cosine.lr(6) == pytest.approx(0.5, abs=1e-15)  # halfway down: cos(pi/2) is 6e-17
    linear = Schedule("linear", 1.0, 4, 0)
    assert [linear.lr(s) for s in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert Schedule("cosine", 1.0, 4, 0).lr(7) == 0.0  # a longer run must not rise again
    assert Schedule("constant", 3.0, 1, 0).lr(100) == 3.0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_warmup_as_long_as_the_run(kind):
    schedule = Schedule(kind, 1.0, 4, 4)
    assert [schedule.lr(step) for step in range(4)] == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("keys", "total", "warmup"),
    [({}, 50, 0), ({"warmup_steps": 7}, 50, 7), ({"warmup_ratio": 0.03}, 50, 2), ({"warmup_ratio": 0.5}, 1, 1)],
)
def test_warmup_of_a_config(keys, total, warmup):
    config = TrainConfig(base_model="m", datasets=[{"path": "d"}], lr_scheduler="linear", learning_rate=1e-3, **keys)
    assert schedule_of(config, total) == Schedule("linear", 1e-3, total, warmup)


@pytest.mark.parametrize("t", [1, 2, 10, 1000])
def test_adams_scales_are_float64(t):
    # 1 - beta^t cancels: at t=1 it keeps 1e-3 of a number with an error of 1e-16
    first, second = adam_scales(t, 0.9, 0.999)
    assert first == pytest.approx(float(1 / (1 - Fraction(0.9) ** t)), rel=1e-12)
    assert second**-2 == pytest.approx(float(1 - Fraction(0.999) ** t), rel=1e-12)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["constant_with_warmup", "linear", "cosine"])
def test_against_transformers(kind):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=WARMUP, num_training_steps=TOTAL)
    ours = Schedule(kind.removesuffix("_with_warmup"), PEAK, TOTAL, WARMUP)
    for step in range(TOTAL):
        assert ours.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14, abs=1e-18)
        optimizer.step()
        theirs.step()
