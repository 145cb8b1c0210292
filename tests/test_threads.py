"""Calls in threads: results in order, a few ahead, errors where they belong."""

import threading
import time
from functools import partial

import pytest

from lorawgpu.util.threads import MOST_THREADS, InOrder


def test_results_are_used_in_order_and_only_a_few_are_computed_ahead():
    gate, started, used = threading.Event(), [], []

    def call(number):
        started.append(number)
        if number == 1:
            gate.wait(5)
        else:
            time.sleep(0.001 * (number % 3))
        return number

    def use(number):
        if number == 0:
            assert len(started) <= MOST_THREADS + 2
            gate.set()
        used.append(number)

    with InOrder() as calls:
        for number in range(100):
            calls.put(partial(call, number), use)
    assert used == list(range(100))


def test_an_error_is_raised_when_its_turn_comes():
    used = []
    with pytest.raises(ZeroDivisionError), InOrder() as calls:
        for number in (1, 0, 2):
            calls.put(partial(lambda n: 1 // n, number), used.append)
    assert used == [1]


def test_an_error_of_the_caller_drops_what_has_not_started():
    started, gate = [], threading.Event()

    def call(number):
        started.append(number)
        gate.wait(5)

    def use(result):
        raise AssertionError("nothing is used after an error")

    with pytest.raises(KeyError), InOrder() as calls:
        calls._threads = 50  # as if on a large machine, so that `put` does not wait
        for number in range(50):
            calls.put(partial(call, number), use)
        gate.set()
        raise KeyError("x")
    assert len(started) < 50
