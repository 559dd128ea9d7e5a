"""Events: a bounded ring, and readers that converge however slow they are."""

import threading

import pytest

from kafka_marshal.remote import api
from kafka_marshal.sidecar.feed import EVENTS_MAX, Ring

NAME = "0123456789abcdef" * 2


@pytest.fixture
def ring():
    def snapshot():
        return (
            api.Snapshot(
                assigned=(),
                releasing=(),
                paused=api.Paused(is_paused=False),
                subscriptions=(),
            ),
            (3, 17),
        )

    return Ring(NAME, snapshot=snapshot)


def opened(ring, after=None):
    return ring.open(threading.RLock(), after=after)


def lost(number):
    return api.Lost(topic="t", partition=number, epoch=1, reason="paused")


def numbers(frames):
    return [getattr(frame.body, "partition", "snapshot") for frame in frames]


def test_events_are_numbered_and_say_what_they_follow_from(ring):
    feed = opened(ring)
    (first,) = feed.take()
    assert first.id == "01234567.0.3.17"
    ring.push(lost(0), (2, 5))
    ring.push(lost(1), (4, 6))
    assert [frame.id for frame in feed.take()] == ["01234567.1.2.5", "01234567.2.4.6"]
    assert feed.take() == []


def test_whoever_comes_again_goes_on_behind_its_last_event(ring):
    for number in range(5):
        ring.push(lost(number), (0, number))
    assert numbers(opened(ring, "01234567.3.0.2").take()) == [3, 4]
    assert numbers(opened(ring, "01234567.5.0.4").take()) == []


@pytest.mark.parametrize(
    "after",
    [
        None,
        "",
        "01234567",
        "01234567.",
        "01234567.6.0.0",
        "fedcba98.1.0.0",
        "01234567.-1.0",
    ],
)
def test_other_ids_begin_with_a_snapshot(ring, after):
    ring.push(lost(0), (0, 0))
    assert numbers(opened(ring, after).take()) == ["snapshot"]


def test_whoever_is_overrun_is_told_everything_anew(ring):
    feed = opened(ring)
    feed.take()
    for number in range(EVENTS_MAX):
        ring.push(lost(number), (0, 0))
    assert len(feed.take()) == EVENTS_MAX, "as many as there is room for"
    for number in range(EVENTS_MAX + 1):
        ring.push(lost(number), (0, 0))
    assert numbers(feed.take()) == ["snapshot"]
    ring.push(lost(7), (0, 0))
    assert numbers(feed.take()) == [7]


def test_the_end_is_told_behind_every_snapshot(ring):
    said = api.Failed(failure=api.Failure(error="E", message="over"))
    ring.push(said, (0, 0))
    for _ in range(2):
        first, second = opened(ring).take()
        assert isinstance(first.body, api.Snapshot)
        assert second.body == said


def test_readers_are_rung_up_until_they_are_closed(ring):
    rung = []
    feed = opened(ring)
    ring.push(lost(0), (0, 0))
    feed.on_news = lambda: rung.append(1)
    ring.push(lost(1), (0, 0))
    assert len(rung) == 1
    ring.close()
    ring.close()
    assert len(rung) == 2
    assert feed.is_closed
    assert numbers(feed.take()) == ["snapshot"], "what came before can be taken"
