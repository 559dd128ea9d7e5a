"""Looks that come together: who is asked for with whom."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kafka_marshal.errors import CoordinationError
from kafka_marshal.sidecar import looks
from kafka_marshal.sidecar.executors import BoundedExecutor
from kafka_marshal.sidecar.looks import GROUPS_MAX, Looks
from kafka_marshal.testing.rig import WAIT_S, until


class Harness:
    """Looks whose groups a test answers one by one."""

    def __init__(self, *, calls_max=20):
        self.executor = BoundedExecutor("look", threads=8, calls_max=calls_max)
        self.groups, self.found = [], {}
        self.may_answer = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.looks = Looks(
            executor=self.executor, call=self._call, respond=self._respond
        )

    def _call(self, calls):
        self.groups.append([call.name for call in calls])
        assert self.may_answer.acquire(timeout=WAIT_S)
        for call in calls:
            if call.name == "bad":
                raise CoordinationError("no broker")
            yield call.name.encode()

    def _respond(self, look, found):
        assert look.call.name not in self.found
        self.found[look.call.name] = found

    def add(self, *names, timeout_ms=9):
        async def add():
            return [
                self.looks.add(SimpleNamespace(name=name, timeout_ms=timeout_ms))
                for name in names
            ]

        return self.loop.run_until_complete(add())

    def started(self, count):
        until(lambda: len(self.groups) == count, f"{count} groups")

    def answered(self, count):
        until(lambda: len(self.found) == count, f"{count} answers")

    def rest(self):
        """Let the event loop run its timers."""
        self.loop.run_until_complete(asyncio.sleep(2 * looks.WAIT_S))

    def close(self):
        self.may_answer.release(99)
        until(lambda: self.executor.count == 0, "all have ended")
        self.executor.close()
        self.loop.close()


@pytest.fixture
def harness():
    made = Harness()
    yield made
    made.close()


def test_a_look_alone_is_answered_at_once(harness):
    harness.may_answer.release()
    assert all(harness.add("a"))
    harness.answered(1)
    assert (harness.groups, harness.found) == ([["a"]], {"a": b"a"})
    until(lambda: harness.executor.count == 0, "its thread is free")


def test_looks_behind_two_groups_are_the_next_one(harness, monkeypatch):
    monkeypatch.setattr(looks, "WAIT_S", 2 * WAIT_S)
    harness.add("a", "b", "c", "d", "e")
    harness.started(GROUPS_MAX)
    harness.may_answer.release()
    harness.started(3)
    assert sorted(harness.groups[:2]) == [["a"], ["b"]]
    assert harness.groups[2] == ["c", "d", "e"]
    harness.may_answer.release(2)
    harness.answered(5)


def test_a_group_has_one_timeout(harness, monkeypatch):
    monkeypatch.setattr(looks, "WAIT_S", 2 * WAIT_S)
    harness.add("a", "b", "c")
    harness.add("d", timeout_ms=10)
    harness.add("e")
    harness.may_answer.release(4)
    harness.answered(5)
    assert sorted(harness.groups[2:]) == [["c", "e"], ["d"]]


def test_looks_do_not_wait_for_slow_groups(harness):
    harness.add("a", "b", "c", "d")
    harness.started(2)
    harness.rest()
    harness.started(3)
    assert harness.groups[2] == ["c", "d"]
    harness.add("e")
    harness.rest()
    harness.started(4)
    harness.may_answer.release(4)
    harness.answered(5)
    until(lambda: harness.looks._group_count == 0, "the threads have ended")


def test_an_error_is_that_of_the_looks_without_an_answer(harness):
    harness.add("x", "y", "a", "bad", "b")
    harness.may_answer.release(3)
    harness.answered(5)
    assert harness.found["a"] == b"a"
    for name in ("bad", "b"):
        assert str(harness.found[name]) == "no broker"


def test_without_a_thread_a_look_is_not_taken():
    harness = Harness(calls_max=0)
    assert harness.add("a") == [None]
    assert harness.looks._group_count == 0
    harness.close()


def test_late_looks_without_a_thread_are_refused():
    harness = Harness(calls_max=2)
    harness.add("a", "b", "c")
    harness.rest()
    assert "busy" in harness.found["c"].failure.message
    harness.may_answer.release(2)
    harness.answered(3)
    harness.close()


def test_a_closed_executor_refuses_all():
    harness = Harness()
    harness.executor.close()
    assert harness.add("a") == [None]
    harness.loop.close()


def test_looks_whose_thread_is_cancelled_are_refused():
    harness = Harness()
    busy = threading.Event()
    for _ in range(8):
        harness.executor.reserve()
        harness.executor.submit(lambda: busy.wait(WAIT_S))
    harness.add("a", "b", "c")
    harness.executor.close()
    busy.set()
    harness.answered(3)
    assert all("shutting" in found.failure.message for found in harness.found.values())
    harness.loop.close()
