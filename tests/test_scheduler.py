"""Who is answered when: the scheduler of `serve` over a decoder that only counts."""

import threading
import time

import numpy as np
import pytest

from lorawgpu.errors import DeviceError
from lorawgpu.generate.batch import Row
from lorawgpu.serve import scheduler as module
from lorawgpu.serve.errors import ApiError
from lorawgpu.serve.scheduler import Choice, Scheduler

END = 7


class Counting:
    """Chooses 100, 101, ... for each row, by how long it is. `log`: the rows of each step, and its tokens."""

    stepwise = False

    def __init__(self, pace=0.0, fails_at=None):
        self.pace, self.fails_at, self.log = pace, fails_at, []

    def lengthen(self, rows):
        pass

    def prefill(self, rows):
        passed = [(row, row.done, range(row.waits)) for row in rows if row.waits]
        for row, _, _ in passed:
            row.done = len(row.ids) - 1
        return passed

    def begin(self, rows):
        self.at = [100 + len(row.ids) for row in rows]

    def submit(self, commands):
        time.sleep(self.pace)
        self.log.append(commands)
        if self.fails_at == len(self.log):
            raise DeviceError("the device was lost")

    def chosen(self, count, first, tokens):
        return np.array([[at + first + i for i in range(tokens)] for at in self.at])


@pytest.fixture
def made(monkeypatch):
    """Makes schedulers, and ends them. `found`: what they delivered, by choice."""
    monkeypatch.setattr(module, "encode", lambda rows, tokens: (sum(len(some) for _, some in rows), tokens))
    running = []

    def make(slots=4096, sequences=4, waiting=8):
        scheduler = Scheduler(slots, sequences, waiting, found.extend, failures.append)
        scheduler.start()
        running.append(scheduler)
        return scheduler

    found, failures = [], []
    make.found, make.failures = found, failures
    yield make
    for scheduler in running:
        scheduler.stop()


def choice(decoder, limit=5, prompt=3, **options):
    return Choice(Row([1] * prompt), decoder, frozenset({END}), limit, **options)


def ended(made, choices, seconds=10):
    """The reasons or errors of choices, once all have ended."""
    until = time.monotonic() + seconds
    while True:
        last = {id(t.choice): t.reason or t.error for t in made.found if t.reason or t.error}
        if all(id(c) in last for c in choices):
            return [last[id(c)] for c in choices]
        assert time.monotonic() < until, "they do not end"
        time.sleep(0.002)


def tokens_of(made, one):
    return [token for turn in made.found if turn.choice is one for token in turn.tokens]


def test_answers_end_at_their_limit_or_an_end_token(made):
    decoder = Counting()
    a, b = choice(decoder, 5), choice(decoder, 9, prompt=4)
    b.stop_ids = frozenset({107})
    made().submit([a, b])
    assert ended(made, [a, b]) == ["length", "stop"]
    assert tokens_of(made, a) == [103, 104, 105, 106, 107] and tokens_of(made, b) == [104, 105, 106]


def test_chunks_grow_after_the_first_token(made):
    decoder = Counting()
    one = choice(decoder, 60)
    made().submit([one])
    ended(made, [one])
    sizes = [tokens for _, tokens in decoder.log]
    assert sizes[0] == 1 and max(sizes) > 4 and sum(sizes) == 60


def test_new_answers_join_a_running_batch(made):
    decoder = Counting(pace=0.002)
    scheduler, long = made(), choice(decoder, 500)
    scheduler.submit([long])
    while len(decoder.log) < 5:
        time.sleep(0.001)
    short = choice(decoder, 3)
    scheduler.submit([short])
    assert ended(made, [short]) == ["length"] and not [t for t in made.found if t.choice is long and t.reason]
    assert {rows for rows, _ in decoder.log} == {1, 2}
    scheduler.cancel([long])


def test_nobody_overtakes_one_that_needs_more_room(made):
    """The cache has room for one long answer, or two short ones; a long one waits for both, and a later one for it."""
    decoder = Counting(pace=0.002)
    scheduler = made(slots=256)
    first = [choice(decoder, 60), choice(decoder, 120)]
    long, late = choice(decoder, 200), choice(decoder, 5)
    scheduler.submit([*first, long, late])
    assert ended(made, [*first, long, late]) == ["length"] * 4
    order = [t.choice for t in made.found if t.reason]
    assert order == [*first, long, late]
    assert scheduler.slots.take(256) == range(256)


def test_too_many_are_refused_and_cancelled_ones_make_room(made):
    decoder = Counting(pace=0.005)
    scheduler = made(sequences=1, waiting=2)
    running, waiting = choice(decoder, 4000), [choice(decoder, 5), choice(decoder, 5)]
    scheduler.submit([running])
    while not scheduler.active:
        time.sleep(0.001)
    scheduler.submit(waiting)
    with pytest.raises(ApiError) as refused:
        scheduler.submit([choice(decoder, 5)])
    assert refused.value.status == 429
    scheduler.cancel([running, waiting[0]])
    assert ended(made, waiting[1:]) == ["length"]
    more = choice(decoder, 2)
    scheduler.submit([more])
    assert ended(made, [more]) == ["length"]
    assert not [t for t in made.found if t.choice in (running, waiting[0]) and t.reason]


def test_only_a_prompt(made):
    one = choice(Counting(), 0)
    made().submit([one])
    assert ended(made, [one]) == ["length"] and tokens_of(made, one) == []


def test_adapters_are_in_one_submit(made):
    one, two = Counting(0.001), Counting(0.001)
    choices = [choice(decoder, 40) for decoder in (one, two, one)]
    made().submit(choices)
    assert ended(made, choices) == ["length"] * 3
    assert (3, 1) in [*one.log, *two.log] and tokens_of(made, choices[1]) == list(range(103, 143))


def test_a_lost_device_ends_all_and_refuses_more(made):
    decoder = Counting(fails_at=3)
    scheduler = made(sequences=1)
    running, waiting = choice(decoder, 500), choice(decoder, 5)
    scheduler.submit([running, waiting])
    assert [str(error) for error in ended(made, [running, waiting])] == ["the device was lost"] * 2
    while not made.failures:
        time.sleep(0.001)
    with pytest.raises(ApiError) as refused:
        scheduler.submit([choice(decoder, 5)])
    assert refused.value.status == 503
    with pytest.raises(ApiError):
        scheduler.call(list)


def test_calls_run_in_the_thread_of_the_device(made):
    scheduler = made()
    assert scheduler.call(threading.current_thread).result(10).name == "scheduler"
    with pytest.raises(ZeroDivisionError):
        scheduler.call(lambda: 1 / 0).result(10)


@pytest.mark.parametrize(("tokens", "seconds", "size"), [(1, 1e-9, 2), (16, 0.001, 16), (8, 0.06, 4), (1, 5.0, 1)])
def test_the_next_chunk_takes_as_long_as_may_be(tokens, seconds, size):
    assert module._next_size(tokens, seconds) == size
