"""What long tasks show on stderr, and durations in words."""

import io
import sys
import time

import pytest

from lorawgpu.util import progress
from lorawgpu.util.duration import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.034, "0.034 s"), (0.4, "0.4 s"), (3.14, "3.1 s"), (36.2, "36 s"), (59.6, "1 min"),
        (65, "1 min 5 s"), (360, "6 min"), (3599.7, "1 h"), (7800, "2 h 10 min"), (90_000, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_what_takes_long_is_said_and_repeated_with_the_time_so_far(monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.05)
    monkeypatch.setattr(progress, "REMINDER", 0.1)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with progress.busy("quick"):
        pass
    with progress.busy("thinking"):
        time.sleep(0.3)
    first, second, *_ = stream.getvalue().splitlines()
    assert first == "thinking ..." and second.startswith("thinking: 0.") and second.endswith(" s so far")
    assert "quick" not in stream.getvalue()
