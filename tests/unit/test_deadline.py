"""Deadlines of calls."""

import pytest

from kafka_marshal.deadline import Deadline, monotonic_ms


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self):
        self.now = 1_000.0

    def now_ms(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_deadline_reports_the_time_left(clock):
    deadline = Deadline(500, clock.now_ms)
    assert (deadline.timeout_ms, deadline.left_ms, deadline.left_s) == (500, 500, 0.5)
    clock.now += 499.5
    assert not deadline.is_over
    assert deadline.left_ms == 0
    assert deadline.left_s == 0.0005


def test_no_time_is_left_after_the_deadline(clock):
    deadline = Deadline(500, clock.now_ms)
    clock.now += 500
    assert deadline.is_over
    assert (deadline.left_ms, deadline.left_s) == (0, 0.0)
    clock.now += 500
    assert (deadline.left_ms, deadline.left_s) == (0, 0.0)


@pytest.mark.parametrize("timeout_ms", [0, -5])
def test_a_timeout_of_zero_or_less_is_over_at_once(clock, timeout_ms):
    deadline = Deadline(timeout_ms, clock.now_ms)
    assert deadline.is_over
    assert deadline.left_ms == 0


def test_require_ms_raises_the_error_of_the_caller(clock):
    deadline = Deadline(2, clock.now_ms)
    assert deadline.require_ms(lambda: KeyError("late")) == 2
    clock.now += 1.5
    with pytest.raises(KeyError, match="late"):
        deadline.require_ms(lambda: KeyError("late"))


@pytest.mark.parametrize(("within_ms", "left_ms"), [(100, 100), (900, 500)])
def test_within_returns_the_earlier_of_two_deadlines(clock, within_ms, left_ms):
    sooner = Deadline(500, clock.now_ms).within(within_ms)
    assert sooner.left_ms == left_ms
    clock.now += left_ms
    assert sooner.is_over


def test_a_deadline_uses_the_monotonic_clock_by_default():
    before_ms = monotonic_ms()
    deadline = Deadline(60_000)
    assert 0 < deadline.left_ms <= 60_000
    assert monotonic_ms() >= before_ms
