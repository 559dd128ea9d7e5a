"""Warm-ups of the application, as the log or a sidecar requests them."""

from concurrent.futures import Future

import attrs
import pytest
from enginekit import KEY

from kafka_marshal.engine.holding import OfferedKey
from kafka_marshal.engine.warm_ups import WarmUps
from kafka_marshal.errors import InvalidTransition


@attrs.define
class Context:
    """A context that keeps its events."""

    now_ms: int = 0
    events: list = attrs.field(factory=list)

    def observe(self, name, fields):
        self.events.append((name, fields))


@attrs.define
class Sub:
    """A subscription whose application answers as the test says."""

    outcome: Future | None
    warm_fetcher: None = None
    expects_claim: bool = False
    is_closing: bool = False

    def warm_up(self, offered):
        del offered
        return self.outcome


@pytest.fixture(name="warm_ups")
def _warm_ups():
    return WarmUps(Context())


def offered(epoch=5):
    return OfferedKey(key=KEY, epoch=epoch, owner="w", position=3, until_ms=9)


def begun(warm_ups, sub):
    warm_ups._begin(offered(), sub)
    return warm_ups._tasks.get(KEY)


def names(warm_ups):
    return [name for name, _ in warm_ups._context.events]


def test_the_end_of_a_warm_up_is_reported_once(warm_ups):
    sub = Sub(Future())
    task = begun(warm_ups, sub)
    assert not warm_ups._is_ready(task)
    assert not sub.expects_claim
    sub.outcome.set_result(None)
    warm_ups._context.now_ms = 7
    assert warm_ups._is_ready(task)
    assert warm_ups._is_ready(task)
    assert sub.expects_claim
    assert names(warm_ups) == ["warming", "warmed"]
    assert warm_ups._context.events[1][1] == {"key": KEY, "warm_ms": 7}


def test_a_failed_warm_up_is_never_ready(warm_ups):
    sub = Sub(Future())
    task = begun(warm_ups, sub)
    sub.outcome.set_exception(ValueError("no disk"))
    assert not warm_ups._is_ready(task)
    assert not warm_ups._is_ready(task)
    assert not sub.expects_claim
    assert names(warm_ups) == ["warming", "warm_failed"]


def test_a_warm_up_that_the_close_of_its_consumer_drops_is_not_reported(warm_ups):
    sub = Sub(Future(), is_closing=True)
    task = begun(warm_ups, sub)
    sub.outcome.set_exception(InvalidTransition("closed"))
    assert not warm_ups._is_ready(task)
    assert names(warm_ups) == ["warming"]


def test_a_later_offer_replaces_the_earlier_one(warm_ups):
    sub = Sub(Future())
    sub.outcome.set_result(None)
    assert warm_ups._is_ready(begun(warm_ups, sub))
    warm_ups._begin(offered(epoch=8), sub)
    assert not sub.expects_claim
    assert warm_ups._tasks[KEY].offered.epoch == 8


def test_no_warm_up_begins_without_a_callback(warm_ups):
    assert begun(warm_ups, Sub(None)) is None
    assert names(warm_ups) == []
