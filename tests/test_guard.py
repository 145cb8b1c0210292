"""Guarded workers: what they return, what stops them, and that they end with the process that started them."""

import errno
import gzip
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from tiny_tokenizer import backend, tiny_tokenizer

from lorawgpu import guard
from lorawgpu.chat.template import ChatTemplate, GuardedTemplate
from lorawgpu.data import workers
from lorawgpu.data.bad_line import BadLine
from lorawgpu.data.dataset import DatasetSpec, LoadSettings, tokenize
from lorawgpu.data.encode import EncodeSettings
from lorawgpu.errors import UserError
from lorawgpu.guard import limits
from lorawgpu.guard.limits import RENDERING
from lorawgpu.guard.status import begin
from lorawgpu.tokenizer.guarded import GuardedTokenizer
from lorawgpu.tokenizer.hf import Tokenizer

MIB = 1 << 20
QUADRATIC = "{% set x = 'ab' * 400000 %}{% for i in range(90000) %}{{ x.rfind('ba' * 40000 + 'c') }}{% endfor %}"


@pytest.fixture
def hasty(monkeypatch):
    """Half a second for rendering."""
    monkeypatch.setattr(limits, "SECONDS", (60.0, 20.0, 10.0, 0.5, 10.0, 10.0))


def add(a, b):
    return a + b


def numbers(count, stop):
    for number in range(count):
        begin(number)
        if number == stop:
            raise UserError("number 3 is bad")
        yield number


def die(how):
    begin(7)
    guard.doing(RENDERING)
    how()


def allocate():
    return len(bytearray(2 << 30))


def answer_too_long():
    return bytes(limits.MAX_REPLY)


def sleep():
    time.sleep(60)


def fail():
    raise KeyError("x")


def where():
    return os.getcwd()


def test_calls_and_streams_return_what_the_function_does(tmp_path, monkeypatch):
    assert guard.call(add, 1, 2) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        raise guard.call(_error)
    assert list(guard.shared_worker().stream(numbers, 5, -1)) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="number 3 is bad"):
        list(guard.shared_worker().stream(numbers, 5, 3))
    for _ in guard.shared_worker().stream(numbers, 10**9, -1):
        break  # what nobody reads is not waited for
    monkeypatch.chdir(tmp_path)
    assert guard.call(where) == str(tmp_path)


def _error():
    try:
        int("x")
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (allocate, "rendering the chat template took more than 640 MiB of memory"),
        (answer_too_long, "rendering the chat template took more than 640 MiB of memory"),
        (os.abort, r"rendering the chat template ended its process \(exit code -?\d+\)"),
        (sleep, "rendering the chat template took longer than 0.5 s"),
        (fail, r"rendering the chat template failed \(KeyError: 'x'\)"),
    ],
)
def test_what_stops_a_worker_is_said_with_the_line(hasty, how, message):
    with pytest.raises(guard.WorkerStopped, match=message) as caught:
        guard.call(die, how) if how is not answer_too_long else guard.call(_long_after_begin)
    assert caught.value.line == 7
    assert guard.call(add, 1, 2) == 3  # in the next process


def _long_after_begin():
    begin(7)
    guard.doing(RENDERING)
    return answer_too_long()


def test_without_limits_of_the_system_a_watchdog_stops_it(monkeypatch):
    worker = guard.Worker()
    worker.call(_unlimit)
    monkeypatch.setattr(limits, "LOADING_MEMORY", 0)
    with pytest.raises(guard.WorkerStopped, match="took more than 640 MiB of memory"):
        worker.call(_touch)


def _unlimit():
    from lorawgpu.guard import memory

    memory._allow(1 << 40)


def _touch():
    kept = []
    while len(kept) < 4000:
        kept.append(b"x" * MIB)
        time.sleep(0.001)


def test_guarded_objects_have_what_the_objects_have(tmp_path):
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    words = Tokenizer.from_hf_folder(tmp_path)
    template = ChatTemplate("{{ messages[0].role }}", {})
    inside = {"encoding", "check_rows", "second_bos", "token_bytes"}  # used by what is in the worker itself
    for real, guarded in (
        (words, GuardedTokenizer.from_hf_folder(tmp_path)),
        (template, GuardedTemplate(template.source, {}, template.now)),
    ):
        names = {name for name in dir(real) if not name.startswith("_")} - inside
        assert names <= set(dir(guarded))
        for name in names:
            if not callable(getattr(real, name)):
                assert getattr(guarded, name) == getattr(real, name), name


def test_an_object_is_made_once_and_again_after_a_stop(tmp_path):
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    made = GuardedTokenizer.from_hf_folder(tmp_path)
    assert guard.call(id, made) == guard.call(id, made) != guard.call(id, GuardedTokenizer.from_hf_folder(tmp_path))
    with pytest.raises(guard.WorkerStopped):
        guard.call(die, os.abort)
    assert made.decode(made.encode("Hello")) == "Hello"


def test_a_template_that_never_ends_is_one_message(hasty):
    with pytest.raises(UserError, match="the chat template was stopped: rendering the chat template took longer than"):
        GuardedTemplate(QUADRATIC, {}).render([])


def test_the_line_that_meets_a_limit_is_named_and_can_be_skipped(tmp_path, hasty, monkeypatch):
    """Also within a task of many lines, in records that another process read, and more than once."""
    monkeypatch.setattr(workers, "WHOLE", 0)
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    words = GuardedTokenizer.from_hf_folder(tmp_path)
    template = GuardedTemplate("{{ messages[0].content }}{% if 'slow' in messages[0].content %}" + QUADRATIC
                               + "{% endif %}", {})  # fmt: skip
    turn = '{"messages": [{"role": "assistant", "content": "%s"}]}\n'
    lines = [turn % ("slow" if i in (3, 8) else f"word {i}") for i in range(1, 11)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    settings = EncodeSettings(64, "truncate", False, ("assistant",))
    for name in ("a.jsonl", "b.jsonl.gz"):
        spec = DatasetSpec(str(tmp_path / name))
        with pytest.raises(BadLine, match=rf"{name}, line 3: rendering the chat template took longer than 0.5 s"):
            tokenize(spec, LoadSettings(settings, words, template))
        store = tokenize(spec, LoadSettings(settings, words, template, skip_bad_lines=True))
        assert len(store) == 8 and store.counts.skipped == 2
        assert ["line 3: " in store.skipped[0], "line 8: " in store.skipped[1]] == [True, True]
        assert store.place(2) == (spec.path, 4)


def test_a_data_set_that_stops_again_and_again_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_encode", _end_at_each_line)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 20)
    loading = LoadSettings(EncodeSettings(64, "truncate", False, ()), tiny_tokenizer(), None, skip_bad_lines=True)
    with pytest.raises(UserError, match=r"a.jsonl, line 11: .*; more than 10 records of this data set did"):
        tokenize(DatasetSpec(str(tmp_path / "a.jsonl")), loading)
    monkeypatch.setattr(workers, "_encode", _end_before_a_line)
    with pytest.raises(UserError, match=r"a.jsonl: reading ended its process \(exit code"):
        tokenize(DatasetSpec(str(tmp_path / "a.jsonl")), loading)


def _end_at_each_line(task, encoder, skip_bad_lines):
    begin(len(task.stopped) + 1)
    os._exit(3)


def _end_before_a_line(task, encoder, skip_bad_lines):
    os._exit(3)


def test_what_keeps_a_worker_from_starting_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="python: a worker process cannot be started: .*No such file"):
        guard.Worker().start()

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match=r"no file for a worker process: No space left on device"):
        guard.Worker().start()


CHILD = """
import os, sys, time
sys.path[:0] = {path!r}
from lorawgpu import guard
import test_guard
print(guard.call(os.getpid), flush=True)
guard.call(test_guard.die, test_guard.sleep)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="signals of POSIX")
@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"])
def test_workers_end_with_their_parent(end):
    path = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    with subprocess.Popen([sys.executable, "-c", CHILD.format(path=path)], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.DEVNULL) as parent:  # fmt: skip
        child = int(parent.stdout.readline())
        parent.send_signal(getattr(signal, end))
        parent.wait(20)
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(") ")[1][0] != "Z"
    except OSError:
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return not os.path.isdir("/proc/1")


def test_a_worker_outlives_the_thread_that_started_it():
    worker = guard.Worker()
    thread = threading.Thread(target=worker.start)
    thread.start()
    thread.join()
    first = worker.call(os.getpid)
    time.sleep(0.2)
    assert worker.call(os.getpid) == first
    worker.close()
