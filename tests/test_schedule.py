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


def rises(step):
    return step / WARMUP


def left(step, end=TOTAL):
    return 1 - min(1.0, (step - WARMUP) / (end - WARMUP))


def half_cosine(part):
    return (1 + math.cos(math.pi * part)) / 2


# (kind, options, the published formula of the part after the warmup)
FORMULAS = [
    ("constant_with_warmup", {}, lambda s: 1.0),
    ("cosine", {"cosine_min_lr_ratio": 0.1}, lambda s: 0.1 + 0.9 * half_cosine(1 - left(s))),
    (
        "cosine",
        {"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0.6},
        lambda s: 0.1 + 0.9 * half_cosine(1 - left(s, 12)),
    ),
    ("cosine", {"num_cycles": 1.5}, lambda s: half_cosine(3 * (1 - left(s)))),
    ("cosine_with_min_lr", {"min_lr": PEAK / 4}, lambda s: 0.25 + 0.75 * half_cosine(1 - left(s))),
    ("cosine_with_restarts", {"num_cycles": 3}, lambda s: half_cosine(3 * (1 - left(s)) % 1) if s < TOTAL else 0),
    ("polynomial", {"lr_end": PEAK / 10, "power": 2.0}, lambda s: 0.1 + 0.9 * left(s) ** 2),
    ("polynomial", {}, lambda s: (1e-7 + (PEAK - 1e-7) * left(s)) / PEAK),
    ("inverse_sqrt", {}, lambda s: math.sqrt(WARMUP / s)),
    ("inverse_sqrt", {"timescale": 9.0}, lambda s: math.sqrt(9 / (s - WARMUP + 9))),
    ("warmup_stable_decay", {"num_decay_steps": 8}, lambda s: 1.0 if s < 12 else half_cosine((s - 12) / 8)),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 5, "num_stable_steps": 6, "decay_type": "1-sqrt"},
        lambda s: 1.0 if s < 10 else 1 - math.sqrt(min(1, (s - 10) / 5)),
    ),
    ("rex", {}, lambda s: left(s) / (1 / 2 + left(s) / 2)),
    ("rex", {"rex_beta": 0.9, "cosine_min_lr_ratio": 0.2}, lambda s: 0.2 + 0.8 * left(s) / (0.1 + 0.9 * left(s))),
]


@pytest.mark.parametrize(("kind", "options", "formula"), FORMULAS)
def test_schedules_follow_their_definitions(kind, options, formula):
    schedule = Schedule(kind, PEAK, TOTAL, WARMUP, options)
    expected = [PEAK * (rises(s) if s < WARMUP else formula(s)) for s in range(TOTAL + 1)]
    assert [schedule.lr(s) for s in range(TOTAL + 1)] == pytest.approx(expected, rel=1e-12, abs=1e-12 * PEAK)


def test_the_shapes_of_a_warmup_stable_decay():
    options = {"num_decay_steps": 4, "min_lr_ratio": 0.5, "warmup_type": "1-sqrt", "decay_type": "linear"}
    schedule = Schedule("warmup_stable_decay", 1.0, 10, 4, options)
    rise = [0.5 + 0.5 * (1 - math.sqrt(1 - part)) for part in (0, 0.25, 0.5, 0.75)]
    expected = [*rise, 1, 1, 1, 0.875, 0.75, 0.625, 0.5]
    assert [schedule.lr(s) for s in range(11)] == pytest.approx(expected, rel=1e-12)


def test_options_come_from_the_config():
    keys = {"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"num_cycles": "1.5"}, "cosine_min_lr_ratio": 0.1}
    config = TrainConfig(base_model="m", datasets=[{"path": "d"}], **keys)
    assert schedule_of(config, 9).options == {"num_cycles": 1.5, "cosine_min_lr_ratio": 0.1}


@pytest.mark.reference
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("cosine_with_min_lr", {"min_lr": PEAK / 7, "num_cycles": 0.7}),
        ("cosine_warmup_with_min_lr", {"min_lr": PEAK / 7}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.3}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {}),
        ("polynomial", {"lr_end": PEAK / 3, "power": 2.5}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 7}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 6, "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt", "decay_type": "linear"}),
    ],
)
@pytest.mark.parametrize(("total", "warmup"), [(TOTAL, WARMUP), (7, 0), (40, 1), (23, 17)])
def test_against_transformers(kind, options, total, warmup):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = get_scheduler(kind, optimizer, warmup, total, options or None)
    ours = Schedule(kind, PEAK, total, warmup, options)
    for step in range(total):
        assert ours.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-12 * PEAK), step
        optimizer.step()
        theirs.step()
