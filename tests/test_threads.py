"""Calls in threads: results in order, a few ahead, errors where they belong."""

import threading
from functools import partial

import pytest

from lorawgpu.util.threads import MOST_THREADS, in_order


def test_results_come_in_order_and_only_a_few_are_computed_ahead():
    gate, started = threading.Event(), []

    def call(number):
        started.append(number)
        if number:
            gate.wait(5)
        return number

    results = in_order(partial(call, number) for number in range(100))
    assert next(results) == 0 and len(started) <= MOST_THREADS + 2
    gate.set()
    assert list(results) == list(range(1, 100))


def test_an_error_is_raised_when_its_turn_comes():
    results = in_order([lambda: 1, lambda: 1 // 0, lambda: 3])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
