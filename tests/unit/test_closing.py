"""What a ``with`` block holds is closed at its end."""

import threading

import pytest

from kafka_marshal.closing import Closing, begin, in_background, warn_unclosed


class Door(Closing):
    def __init__(self):
        self.closed_count = 0

    def close(self):
        self.closed_count += 1


def test_it_is_closed_at_the_end():
    with Door() as door:
        assert door.closed_count == 0
    assert door.closed_count == 1


def test_a_call_that_was_begun_has_an_outcome():
    def fail():
        raise SystemExit(3)

    named = begin(lambda: threading.current_thread().name, name="n")
    assert not named.cancel()
    assert named.result(30) == "n"
    with pytest.raises(SystemExit):
        begin(fail, name="n").result(30)


def test_what_may_block_runs_on_a_thread_of_its_own():
    seen = []
    thread = in_background(lambda: seen.append(threading.current_thread()), name="n")
    thread.join()
    assert seen == [thread]
    assert (thread.name, thread.daemon) == ("n", True)


def test_an_error_goes_on_after_it_was_closed():
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError("x")
    assert door.closed_count == 1


def test_what_is_dropped_open_is_named():
    with pytest.warns(ResourceWarning, match="unclosed 'a door': its claims") as caught:
        warn_unclosed("a door")
    assert caught[0].source == "a door"
