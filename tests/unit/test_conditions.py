"""The condition, interrupted wherever Python may run a signal handler."""

import threading

import pytest
from interrupting import interrupted

from kafka_marshal.conditions import Condition


@pytest.fixture
def condition():
    return Condition(threading.RLock())


def is_free(condition):
    """Return whether another thread can acquire the condition."""
    found = []

    def look():
        found.append(condition.acquire(blocking=False))
        if found[0]:
            condition.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found == [True]


def test_a_condition_is_acquired_and_released(condition):
    with condition as is_acquired:
        assert is_acquired
        assert not is_free(condition)
        condition.notify_all()
    assert is_free(condition)
    with pytest.raises(RuntimeError):
        condition.notify_all()


def test_a_wait_ends_at_its_deadline_or_a_notification(condition):
    with condition:
        assert not condition.wait(0)
        assert not condition.wait_for(lambda: False, 0)

    def notify():
        with condition:
            condition.notify_all()

    thread = threading.Thread(target=notify)
    with condition:
        thread.start()
        assert condition.wait(60)
    thread.join()


@pytest.mark.parametrize("name", ["enter", "wait"])
def test_an_interrupt_leaves_the_condition_unlocked(condition, name):
    """Else it would stay locked, or the block would end with RuntimeError."""

    def call():
        with condition:
            if name == "wait":
                condition.wait(0)

    at = 0
    while interrupted(call, at, everywhere=True)[0]:
        assert is_free(condition), at
        at += 1
    assert at > 0 or name == "enter"
