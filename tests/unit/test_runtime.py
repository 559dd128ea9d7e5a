"""One runtime per connection: opened once, shared, and stopped by its last user."""

import threading
from types import SimpleNamespace

import pytest

from kafka_marshal import runtime as module
from kafka_marshal.errors import DeadlineExceeded
from kafka_marshal.kafka_io.settings import ConnectionConfig

ONE, OTHER = ConnectionConfig("one:9092"), ConnectionConfig("other:9092")
WAIT_MS = 60_000


class Made:
    """Stands for a runtime."""

    def __init__(self):
        self.users, self.is_stopped = 0, False
        self.engine = SimpleNamespace(failure=None)

    def stop(self):
        self.is_stopped = True


def acquired(settings, make=lambda **_: Made(), timeout_ms=WAIT_MS):
    return module.acquire(settings, make, timeout_ms=timeout_ms)


@pytest.fixture
def slow():
    """A thread that opens a runtime of ``ONE``, until the test ends."""
    has_begun, may_end = threading.Event(), threading.Event()

    def make(*, timeout_ms):
        has_begun.set()
        may_end.wait(timeout_ms / 1000)
        return Made()

    thread = threading.Thread(target=lambda: module.release(acquired(ONE, make)))
    thread.start()
    assert has_begun.wait(WAIT_MS / 1000)
    yield
    may_end.set()
    thread.join()


def test_users_of_a_connection_share_a_runtime_until_the_last_one_releases_it():
    first, second, other = acquired(ONE), acquired(ONE), acquired(OTHER)
    assert first is second is not other
    module.release(first)
    assert not first.is_stopped
    module.release(second)
    assert first.is_stopped
    assert not other.is_stopped
    module.release(other)


def test_a_failed_runtime_is_replaced_and_its_users_release_it():
    failed = acquired(ONE)
    failed.engine.failure = RuntimeError("gone")
    fresh = acquired(ONE)
    assert fresh is not failed
    module.release(failed)
    assert (failed.is_stopped, fresh.is_stopped) == (True, False)
    module.release(fresh)


def test_other_connections_do_not_wait_for_one_that_is_being_opened(slow):
    """A cluster that does not answer held up each open and close of the others."""
    other = acquired(OTHER)
    module.release(other)
    assert other.is_stopped


def test_a_wait_for_another_thread_that_opens_ends_at_the_timeout(slow):
    with pytest.raises(DeadlineExceeded, match="still connecting to one:9092 after 5"):
        acquired(ONE, timeout_ms=5)


def test_after_a_failed_open_the_next_user_opens_again():
    def fail(**_):
        raise RuntimeError("no broker")

    with pytest.raises(RuntimeError, match="no broker"):
        acquired(ONE, fail)
    module.release(acquired(ONE))
