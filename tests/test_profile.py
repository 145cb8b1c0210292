"""GPU time from timestamps: of each record, and of whole passes while plans run."""

from types import SimpleNamespace

import pytest

from lorawgpu.gpu import Plan
from lorawgpu.gpu import profile as module
from lorawgpu.gpu.profile import Clock, profile

COUNT = 70_000  # elements per clear: measurable, but one dispatch


@pytest.fixture
def cleared(plan, device):
    if "timestamp-query" not in device.features:
        pytest.skip("this adapter has no timestamps")
    for name in ("a", "b"):
        with plan.section(name), plan.scope("layers.0"):
            plan.clear(device.tensor((COUNT,)))
    return plan


def test_kinds_leave_out_the_layer_and_count_what_moves(cleared):
    seconds, count, flops, nbytes = profile(cleared, ["a", "b"])["clear:main"]
    assert seconds > 0 and (count, flops, nbytes) == (2, 0, 2 * 4 * COUNT)


def test_a_tick_need_not_be_a_nanosecond(cleared, monkeypatch):
    """On AMD and Intel it is not. The same work, with ticks ten million times as long, must seem to take longer."""
    plain = profile(cleared, ["a"])["clear:main"][0]
    monkeypatch.setattr(module, "lib", SimpleNamespace(wgpuQueueGetTimestampPeriod=lambda _: 1e7))
    assert profile(cleared, ["a"])["clear:main"][0] > 1e4 * plain


def test_a_clock_counts_every_pass_and_lets_go_of_its_plans(cleared, device):
    outer = cleared.begin_pass
    clock = Clock([cleared])
    for _ in range(3):
        cleared.run("a")
        cleared.run("b")
    assert clock.count == 6  # one pass per submit
    busy, span = clock.busy()
    assert 0 < busy <= span
    assert cleared.begin_pass is outer
    cleared.run("a")
    assert clock.count == 6


def test_a_clock_needs_timestamps(plan, device, monkeypatch):
    monkeypatch.setattr(device, "features", [])
    with pytest.raises(ValueError, match="no timestamp queries"):
        Clock([plan])
    assert profile(Plan(device), []) == {}
