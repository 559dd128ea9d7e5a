"""Objects that ``with`` blocks close, and calls on threads of their own."""

import subprocess
import sys
import threading

import pytest

from kafka_marshal.closing import Closing, begin, in_background, warn_unclosed


class Door(Closing):
    def __init__(self):
        self.closed_count = 0

    def close(self):
        self.closed_count += 1


def test_an_object_is_closed_at_the_end_of_its_block():
    with Door() as door:
        assert door.closed_count == 0
    assert door.closed_count == 1


UNFINISHED = """
import threading
from kafka_marshal.closing import Closing

class Door(Closing):
    def close(self):
        threading.Thread(target=print, daemon=True).start()

def through():
    with Door():
        yield

class Dropped:
    def __init__(self):
        self.door = Door()

    def __del__(self):
        self.door.close()

opened = through()
next(opened)
dropped = Dropped()
"""


def test_the_end_of_the_interpreter_does_not_wait_for_a_close():
    """No thread starts any more, so ``close`` would wait for it forever."""
    subprocess.run([sys.executable, "-c", UNFINISHED], check=True, timeout=120)


def test_a_close_does_nothing_while_the_interpreter_ends(monkeypatch):
    door = Door()
    with monkeypatch.context() as ending:
        ending.setattr("sys.is_finalizing", lambda: True)
        door.close()
    assert door.closed_count == 0
    door.close()
    assert door.closed_count == 1


def test_begin_returns_a_future_with_the_outcome():
    def fail():
        raise SystemExit(3)

    named = begin(lambda: threading.current_thread().name, name="n")
    assert not named.cancel()
    assert named.result(30) == "n"
    with pytest.raises(SystemExit):
        begin(fail, name="n").result(30)


def test_in_background_runs_a_call_on_a_daemon_thread():
    seen = []
    thread = in_background(lambda: seen.append(threading.current_thread()), name="n")
    thread.join()
    assert seen == [thread]
    assert (thread.name, thread.daemon) == ("n", True)


def test_an_exception_closes_the_object_and_propagates():
    door = Door()
    with pytest.raises(KeyError), door:
        raise KeyError("x")
    assert door.closed_count == 1


def test_warn_unclosed_names_the_object():
    with pytest.warns(ResourceWarning, match="unclosed 'a door': its claims") as caught:
        warn_unclosed("a door")
    assert caught[0].source == "a door"
