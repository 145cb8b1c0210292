"""metrics.jsonl and the progress line."""

import io
import json
import math
import os
import re
import subprocess
import sys
import time

import pytest

from lorawgpu.train.metrics import EVALUATING, MetricsLog, Progress, read_metrics


def test_records_are_flushed_and_non_finite_numbers_are_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write(1, loss=0.5, samples=["grüß dich"])
    log.write(2, loss=math.nan, grad_norm=math.inf, nested={"x": [-math.inf]})
    lines = (tmp_path / "m.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"step": 1, "loss": 0.5, "samples": ["grüß dich"]}'
    assert json.loads(lines[1]) == {"step": 2, "loss": None, "grad_norm": None, "nested": {"x": [None]}}


def test_resume_cuts_at_the_step_and_drops_an_incomplete_line(tmp_path):
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write(step, loss=1.0 / step)
    log.write(2, eval_loss=0.1)
    log.close()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')
    before = path.read_bytes().splitlines(keepends=True)
    log = MetricsLog(path, resume_step=2)
    assert path.read_bytes().splitlines(keepends=True) == [before[0], before[1], before[3]]
    log.write(3, loss=9.0)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 2, 3]
    log.close()
    MetricsLog(path).close()
    assert read_metrics(path) == [] and read_metrics(tmp_path / "none") == []


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.tick(seconds)` moves."""

    class Clock:
        now = 0.0

        def tick(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def run(tmp_path, clock, stream, evaluations=(0, 0, 0)):
    """Steps 5 to 8 of 8: two of 2 s, an evaluation of 1000 s, and two of 1 s, one of which waits for data.

    evaluations: how many are still to come at each logged step.
    """
    left = iter(evaluations)
    still = [0]
    log = MetricsLog(tmp_path / "m.jsonl")
    progress = Progress(log, total_steps=8, start_step=4, stream=stream, evaluations_left=lambda: still[0])
    for _ in range(2):
        clock.tick(2.0)
        progress.advance(100)
    still[0] = next(left)
    progress.logged(6, loss=2.0, lr=1e-4, grad_norm=0.5, bad_steps=0)
    with progress.paused(EVALUATING):
        clock.tick(1000.0)
    with progress.waiting():
        clock.tick(1.0)
    progress.advance(100)
    still[0] = next(left)
    progress.logged(7, loss=math.nan, lr=5e-5, grad_norm=math.inf)
    clock.tick(1.0)
    progress.advance(100)
    still[0] = next(left)
    progress.logged(8, loss=1.0, lr=0.0, grad_norm=0.25)
    progress.message("done")
    progress.close()
    return progress


def test_rates_count_training_time_only(tmp_path, clock):
    progress = run(tmp_path, clock, io.StringIO())
    records = read_metrics(tmp_path / "m.jsonl")
    assert records[0] == {"step": 6, "loss": 2.0, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_s": 50.0,
                          "tokens": 200, "seconds": 4.0, "paused_seconds": 0.0, "data_wait_seconds": 0.0,
                          "bad_steps": 0}  # fmt: skip
    assert [r["tokens_per_s"] for r in records] == [50.0, 100.0, 100.0] and records[-1]["tokens"] == 400
    assert [(r["seconds"], r["paused_seconds"], r["data_wait_seconds"]) for r in records[1:]] == [
        (5.0, 1000.0, 1.0), (6.0, 1000.0, 1.0),
    ]  # fmt: skip
    assert progress.summary() == (
        "4 steps, 400 tokens in 00:06 (67 tok/s), loss 2.0000 -> 1.0000; 16 min 40 s evaluating; 1 s of training "
        "waiting for data"
    )


def test_a_file_gets_one_plain_line_per_logged_step(tmp_path, clock):
    stream = io.StringIO()
    run(tmp_path, clock, stream)
    assert stream.getvalue().splitlines() == [
        "step 6/8 loss 2.0000 lr 1.00e-04 grad 0.5 50 tok/s ETA 00:04",
        "step 7/8 loss nan lr 5.00e-05 grad inf 100 tok/s ETA 00:01",
        "step 8/8 loss 1.0000 lr 0.00e+00 grad 0.25 100 tok/s ETA 00:00",
        "done",
    ]


def test_the_time_left_counts_evaluations_as_evaluations(tmp_path, clock):
    """After step 7, at 5 s for 3 steps: one step of 5/3 s and one evaluation of 1000 s."""
    stream = io.StringIO()
    run(tmp_path, clock, stream, evaluations=(2, 1, 0))
    left = re.findall(r"ETA (\S+)", stream.getvalue())
    assert left == ["00:04", "16:41", "00:00"]  # of step 6: no evaluation has been measured yet


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_is_rewritten(tmp_path, clock):
    stream = Terminal()
    run(tmp_path, clock, stream)
    assert "step 8/8" in stream.getvalue() and "loss 1.0000 lr 0.00e+00 grad 0.25 100 tok/s" in stream.getvalue()
    assert "16:46<00:00" in stream.getvalue() and "," not in stream.getvalue()
    lines = [line for line in stream.getvalue().split("\n") if line.strip()]
    assert len(lines) <= 2  # the line, with the message once above it


@pytest.mark.parametrize("columns", [0, 40, 200])
def test_every_terminal_shows_the_loss(columns):
    """Some terminals say that they are 0 columns wide. In a narrow one, the bar is cut off before the loss."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom lorawgpu.train.metrics import NoLog, Progress\n"
        "progress = Progress(NoLog(), 3)\nprogress.advance(1)\nprogress.logged(1, 2.5, 1e-4, 0.5)\nprogress.close()"
    )
    shown = in_terminal([sys.executable, "-c", script], columns)
    assert "step 1/3 loss 2.5000 lr 1.00e-04" in shown and ("█" in shown) == (columns != 40)


def in_terminal(command, columns: int) -> str:
    """What a command prints in a terminal of that width."""
    if sys.platform == "win32":
        pytest.skip("pseudo-terminals are POSIX")
    import fcntl
    import pty
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # Linux, when the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert process.wait() == 0
    return shown.decode()


def test_the_line_of_a_terminal_returns_to_training_after_an_evaluation(tmp_path, clock):
    progress = Progress(MetricsLog(tmp_path / "m.jsonl"), total_steps=8, stream=Terminal())
    with progress.paused(EVALUATING):
        progress.doing("held-out loss: 10 of 40 tokens")
        assert progress.bar.desc == "held-out loss: 10 of 40 tokens"
        clock.tick(60.0)
    assert progress.bar.desc == "01:00<00:00"
    progress.close()


def test_what_is_done_instead_of_training_is_shown_every_few_seconds(tmp_path, clock):
    stream = io.StringIO()
    progress = Progress(MetricsLog(tmp_path / "m.jsonl"), total_steps=8, stream=stream)
    with progress.paused(EVALUATING):
        for tokens in (10, 20, 30):
            clock.tick(3.0)
            progress.doing(f"held-out loss: {tokens} of 40 tokens")
    assert stream.getvalue() == "held-out loss: 20 of 40 tokens\n"
    progress.close()


def test_summary_without_a_logged_step(tmp_path, clock):
    progress = Progress(MetricsLog(tmp_path / "m.jsonl"), total_steps=3, stream=io.StringIO())
    progress.close()
    assert progress.summary() == "0 steps, 0 tokens in 00:00 (0 tok/s)"
