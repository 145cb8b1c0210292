"""What the end of a run says about it."""

import pytest

from lorawgpu.train.outcome import risen


@pytest.mark.parametrize(
    ("losses", "first", "last"),
    [
        ([4.1, 9.0, 14.0], 4.1, 14.0),
        ([2.0, 4.0, *[1.0] * 16, 3.0, 5.0], 3.0, 4.0),  # tenths of 20: (2 + 4) / 2 and (3 + 5) / 2
    ],
)
def test_a_rising_loss_is_said(losses, first, last):
    text = risen(losses, 2e-4)
    assert f"rose, from {first:.4f} in the first tenth of the run to {last:.4f} in the last" in text
    assert "lower learning_rate (0.0002)" in text


@pytest.mark.parametrize("losses", [[], [4.1], [4.1, 4.1], [4.1, 14.0, 4.0], [2.0, 4.0, *[9.0] * 16, 3.0, 2.9]])
def test_other_runs_say_nothing(losses):
    assert risen(losses, 2e-4) == ""
